"""The parsers that `--reasoning-parser` and `--tool-call-parser` select by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surestep_common.registry import Registry

from .base import Parser, ReasoningParser

if TYPE_CHECKING:
    from .qwen3_coder import Schemas

REASONING_PARSERS: Registry[ReasoningParser] = Registry("reasoning parser")  # made of the prompt
TOOL_PARSERS: Registry[Parser] = Registry("tool call parser")  # made of the tools' Schemas


@REASONING_PARSERS.register("qwen3")
def _qwen3(prompt: str) -> ReasoningParser:
    from .qwen3 import Qwen3ReasoningParser

    return Qwen3ReasoningParser(prompt)


@TOOL_PARSERS.register("hermes")
def _hermes(schemas: Schemas) -> Parser:
    from .hermes import HermesToolParser

    return HermesToolParser()


@TOOL_PARSERS.register("qwen3_coder")
def _qwen3_coder(schemas: Schemas) -> Parser:
    from .qwen3_coder import Qwen3CoderToolParser

    return Qwen3CoderToolParser(schemas)
