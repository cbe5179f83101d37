"""The parsers that `--reasoning-parser` and `--tool-call-parser` select by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surestep_common.registry import Registry

from .base import Parser, ReasoningParser

if TYPE_CHECKING:
    from .qwen3_coder import Schemas

# Made of the prompt and the Schemas of the tools that may be called.
REASONING_PARSERS: Registry[ReasoningParser] = Registry("reasoning parser")
# Made of those Schemas; None where the reasoning parser of the same format reads calls as well.
TOOL_PARSERS: Registry[Parser | None] = Registry("tool call parser")
HARMONY_REASONING, HARMONY_CALLS = "openai_gptoss", "openai"  # vLLM's names for one format


@REASONING_PARSERS.register(HARMONY_REASONING)
def _harmony(prompt: str, schemas: Schemas) -> ReasoningParser:
    from .harmony import HarmonyParser

    return HarmonyParser(prompt, schemas)


@TOOL_PARSERS.register(HARMONY_CALLS)
def _harmony_calls(schemas: Schemas) -> None:
    return None


@REASONING_PARSERS.register("qwen3")
def _qwen3(prompt: str, schemas: Schemas) -> ReasoningParser:
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
