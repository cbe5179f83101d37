"""The parsers that `--reasoning-parser` and `--tool-call-parser` select by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surestep_common.registry import Registry

from .base import Parser, ReasoningParser

if TYPE_CHECKING:
    from .tools import Schemas

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


@REASONING_PARSERS.register("qwen3", "deepseek_v3")
def _thought(prompt: str, schemas: Schemas) -> ReasoningParser:
    from .qwen3 import ThoughtParser

    return ThoughtParser(prompt)


@REASONING_PARSERS.register("deepseek_r1", "minimax_m2")
def _always_thought(prompt: str, schemas: Schemas) -> ReasoningParser:
    from .qwen3 import ThoughtParser

    return ThoughtParser(prompt, reasons=True)


@REASONING_PARSERS.register("mistral")
def _mistral_thought(prompt: str, schemas: Schemas) -> ReasoningParser:
    from .qwen3 import MistralThoughtParser

    return MistralThoughtParser(prompt)


@REASONING_PARSERS.register("glm45", "glm47")
def _glm(prompt: str, schemas: Schemas) -> ReasoningParser:
    from .glm import GlmReasoningParser

    return GlmReasoningParser(prompt, schemas)


@TOOL_PARSERS.register("hermes")
def _hermes(schemas: Schemas) -> Parser:
    from .json_calls import HermesToolParser

    return HermesToolParser(schemas)


@TOOL_PARSERS.register("llama3_json", "llama4_json", "mistral", "xlam")
def _bare_json(schemas: Schemas) -> Parser:
    from .json_calls import BareJsonToolParser

    return BareJsonToolParser(schemas)


@TOOL_PARSERS.register("pythonic", "llama4_pythonic")
def _pythonic(schemas: Schemas) -> Parser:
    from .pythonic import PythonicToolParser

    return PythonicToolParser(schemas)


@TOOL_PARSERS.register("qwen3_coder", "qwen3_xml")  # one format has two names in vLLM
def _qwen3_coder(schemas: Schemas) -> Parser:
    from .qwen3_coder import Qwen3CoderToolParser

    return Qwen3CoderToolParser(schemas)


@TOOL_PARSERS.register("glm45", "glm47")
def _glm_calls(schemas: Schemas) -> Parser:
    from .glm import GlmToolParser

    return GlmToolParser(schemas)


@TOOL_PARSERS.register("deepseek_v3", "deepseek_v31")
def _deepseek_v3(schemas: Schemas) -> Parser:
    from .sections import DeepSeekV3ToolParser

    return DeepSeekV3ToolParser(schemas)


@TOOL_PARSERS.register("deepseek_v32")
def _deepseek_v32(schemas: Schemas) -> Parser:
    from .sections import DeepSeekV32ToolParser

    return DeepSeekV32ToolParser(schemas)


@TOOL_PARSERS.register("minimax_m2")
def _minimax_m2(schemas: Schemas) -> Parser:
    from .sections import MiniMaxM2ToolParser

    return MiniMaxM2ToolParser(schemas)
