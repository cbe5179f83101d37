"""The parsers that `--reasoning-parser` and `--tool-call-parser` select by name."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

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


@REASONING_PARSERS.register("kimi_k2")
def _kimi_k2_thought(prompt: str, schemas: Schemas) -> ReasoningParser:
    from .qwen3 import ThoughtParser
    from .sections import KimiK2ToolParser

    also_ends = KimiK2ToolParser.opens if schemas else ()
    return ThoughtParser(prompt, also_ends=also_ends, reasons=True)


@REASONING_PARSERS.register("glm45", "glm47")
def _glm(prompt: str, schemas: Schemas) -> ReasoningParser:
    from .glm import GlmReasoningParser

    return GlmReasoningParser(prompt, schemas)


_THOUGHTS = {  # names in vLLM of classes in qwen3.py, and whether they need no first marker
    ("ThoughtParser", False): ("qwen3", "deepseek_v3"),
    ("ThoughtParser", True): ("deepseek_r1", "minimax_m2", "nemotron_v3", "olmo3", "step3"),
    ("MistralThoughtParser", False): ("mistral",),
    ("GraniteThoughtParser", False): ("granite",),
    ("HunyuanThoughtParser", False): ("hunyuan_a13b",),
    ("SeedOssThoughtParser", True): ("seed_oss",),
    ("ErnieThoughtParser", True): ("ernie45",),
}
_CALLS = {  # in modules of this package, each with its names in vLLM
    "json_calls.HermesToolParser": ("hermes", "ernie45", "granite4"),
    "json_calls.GraniteToolParser": ("granite",),
    "json_calls.Granite20bToolParser": ("granite-20b-fc",),
    "json_calls.Phi4MiniToolParser": ("phi4_mini_json",),
    "json_calls.ToolCallsParser": ("hunyuan_a13b", "jamba", "minimax"),
    "json_calls.NemotronToolParser": ("nemotron_json",),
    "json_calls.InternLmToolParser": ("internlm",),
    "json_calls.BareJsonToolParser": ("llama3_json", "llama4_json", "mistral", "xlam"),
    "pythonic.PythonicToolParser": ("pythonic", "llama4_pythonic"),
    "pythonic.Olmo3ToolParser": ("olmo3",),
    "qwen3_coder.Qwen3CoderToolParser": ("qwen3_coder", "qwen3_xml"),
    "qwen3_coder.SeedOssToolParser": ("seed_oss",),
    "glm.GlmToolParser": ("glm45", "glm47"),
    "sections.DeepSeekV3ToolParser": ("deepseek_v3", "deepseek_v31"),
    "sections.KimiK2ToolParser": ("kimi_k2",),
    "sections.DeepSeekV32ToolParser": ("deepseek_v32",),
    "sections.MiniMaxM2ToolParser": ("minimax_m2",),
    "sections.Step3ToolParser": ("step3",),
}


def _class(module: str, name: str) -> Any:
    return getattr(import_module(f".{module}", __package__), name)


def _thought(kind: tuple[str, bool], prompt: str, schemas: Schemas) -> ReasoningParser:
    name, reasons = kind
    parser: ReasoningParser = _class("qwen3", name)(prompt, reasons=reasons)
    return parser


def _calls(path: str, schemas: Schemas) -> Parser:
    parser: Parser = _class(*path.split("."))(schemas)
    return parser


for _kind, _names in _THOUGHTS.items():
    REASONING_PARSERS.register(*_names)(partial(_thought, _kind))
for _path, _names in _CALLS.items():
    TOOL_PARSERS.register(*_names)(partial(_calls, _path))
