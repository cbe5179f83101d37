"""Tokenizer and chat template of a model, and which work may run in which process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import orjson
from tokenizers import Tokenizer as RustTokenizer

from surestep_gateway.settings.api_settings import ApiSettings
from surestep_gateway.settings.config import GatewaySettings

from .chat_template import ChatTemplate
from .process_limits import NeedsProcess, TurnLimit, computing_limit
from .tokenizer import Tokenizer

_CHECK_S = 0.5  # of computing, to check a schema, a regular expression or a grammar
_TURN_S = 0.05  # that a template may compute on the event loop; usual ones take less than 1 ms
_NEEDED = {  # of the settings, in a text process; no keys, and no files
    "model",
    "trust_request_chat_template",
    "chat_template_timeout_s",
    "text_memory_bytes",
    "reasoning_parser",
    "tool_call_parser",
    "enable_auto_tool_choice",
    "max_n",
    "max_logprobs",
    "allow_special_tokens_in_content",
    "max_answer_bytes",
    "log_level",
    "log_json",
    "hf_overrides",
    *ApiSettings.__annotations__,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextProcessor:
    """Everything needed to prepare requests, on the event loop or in a text process."""

    settings: GatewaySettings
    tokenizer: Tokenizer
    template: ChatTemplate
    turn: TurnLimit = field(default_factory=lambda: TurnLimit(_TURN_S))  # of a template
    tell: Callable[[str], None] | None = None  # in a text process: the field that is checked now

    @classmethod
    def load(cls, settings: GatewaySettings) -> TextProcessor:
        """Read the model folder. Raise InvalidRequest."""
        folder = settings.tokenizer or settings.model
        return cls(
            settings=settings,
            tokenizer=Tokenizer.load(folder),
            template=ChatTemplate.load(folder, settings.chat_template),
        )

    def dump(self) -> list[bytes]:
        """Return the content for `restore`: the model folder may be gone when the process
        starts.
        """
        settings = self.settings.model_dump(mode="json", include=_NEEDED)
        settings["served_model_name"] = self.settings.model_names
        return [
            orjson.dumps(settings),
            self.tokenizer.definition.encode(),
            orjson.dumps(self.template.definition),
        ]

    @classmethod
    def restore(
        cls, parts: Sequence[bytes], tell: Callable[[str], None] = lambda field: None
    ) -> TextProcessor:
        """Return the text processor of a text process."""
        settings, tokenizer, template = parts
        source, special_tokens, tool_source = orjson.loads(template)
        return cls(
            settings=GatewaySettings.model_validate(orjson.loads(settings)),
            tokenizer=Tokenizer(RustTokenizer.from_str(tokenizer.decode())),
            template=ChatTemplate(source, special_tokens, tool_source=tool_source),
            tell=tell,
        )

    @property
    def apart(self) -> bool:
        """Return whether this is a text process."""
        return self.tell is not None

    @contextlib.contextmanager
    def checking(self, field: str) -> Iterator[None]:
        """Bound the work on the grammar that a field asks for; it may end this text process."""
        if self.tell is None:
            yield
            return
        self.tell(field)
        with computing_limit(_CHECK_S):
            yield
        self.tell("")

    def only_apart(self, condition: bool) -> None:
        """Raise NeedsProcess if the condition holds and this is no text process."""
        if condition and not self.apart:
            raise NeedsProcess
