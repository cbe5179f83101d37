"""The text side of a model: its tokenizer, its chat template, and what may be done where."""

from __future__ import annotations

from dataclasses import dataclass

from .chat import ChatTemplate
from .config import GatewaySettings
from .tokenizer import Tokenizer


class NeedsProcess(Exception):
    """This request must be prepared in a text process: its work has no bound that is known here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSide:
    """What it takes to prepare requests. `apart` says whether this is a text process."""

    settings: GatewaySettings
    tokenizer: Tokenizer
    template: ChatTemplate
    apart: bool = False

    @classmethod
    def load(cls, settings: GatewaySettings, *, apart: bool = False) -> TextSide:
        """Read the model folder. Raises InvalidRequest."""
        return cls(
            settings=settings,
            tokenizer=Tokenizer.load(settings.model),
            template=ChatTemplate.load(settings.model, settings.chat_template),
            apart=apart,
        )

    def only_apart(self, condition: bool) -> None:
        """Raises NeedsProcess if the condition holds and this is no text process."""
        if condition and not self.apart:
            raise NeedsProcess
