"""`--structured-outputs-config`: a JSON object with vLLM's key names."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict


class JsonStyle(NamedTuple):
    """Style of JSON beyond its schema."""

    any_whitespace: bool = True
    whitespace_pattern: str | None = None  # a regular expression
    additional_properties: bool = False  # where a schema does not say
    lenient: bool = True  # a schema may be served by a wider one, and answers are checked


class StructuredOutputsConfig(BaseModel):
    """Settings of all structured outputs. Whichever backend is named, llguidance serves."""

    model_config = ConfigDict(extra="forbid")

    backend: Literal["auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"] = "auto"
    disable_fallback: bool = False  # no effect: there is nothing to fall back to
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True  # false: the letter of JSON Schema, as in vLLM
    lenient: bool = True  # ours; false: a schema that is not known in full is refused
    enable_in_reasoning: bool = False  # reasoning is part of what a grammar describes

    def style(self) -> JsonStyle:
        """Return what JSON looks like unless a request asks for less."""
        return JsonStyle(
            any_whitespace=not self.disable_any_whitespace,
            additional_properties=not self.disable_additional_properties,
            lenient=self.lenient,
        )
