"""`surestep chat`: its flags."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic_settings import CliPositionalArg
from rich.console import Console

from surestep_cli.api.http import ServerUrl


class Chat(ServerUrl):
    """Talk to a running server. With a prompt, or with text on standard input: one answer."""

    prompt: CliPositionalArg[list[str]] = Field(
        default_factory=list, description="what to ask; none = a conversation"
    )
    model: str | None = Field(
        default=None, description="name of the model; none = the server's first"
    )
    system: str | None = Field(default=None, description="instructions before the first question")
    temperature: float | None = Field(
        default=None, ge=0, description="none = the model's own default"
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description="longest answer; none = what the server allows"
    )
    seed: int | None = Field(default=None, description="none = another one for each answer")
    extra: dict[str, object] = Field(
        default_factory=dict, description="JSON merged into every request body"
    )
    timeout_s: float = Field(default=300.0, gt=0, description="seconds of silence that are borne")

    def run(self, console: Console) -> int:
        """Return the exit status: 0 when there was an answer."""
        from .chat import run_chat
        from .conversation import Conversation, first_model

        chosen: dict[str, Any] = {
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }
        fields = {name: value for name, value in chosen.items() if value is not None}
        fields |= {"model": self.model or first_model(self.url, self.key()), **self.extra}
        chat = Conversation(self.url, self.key(), fields, self.timeout_s, self.system)
        return run_chat(chat, self.prompt, Console(highlight=False))
