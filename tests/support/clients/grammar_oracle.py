"""What belongs to the language of an output, token by token."""

from __future__ import annotations

import json
from pathlib import Path

from llguidance import LLMatcher
from support.checkpoints import tiny_tokenizer
from surestep_gateway.grammars.reasoning import Format
from surestep_gateway.parsers import REASONING_PARSERS
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_worker.grammar.matcher import matcher_of, tokenizer_of

MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
    ),
    *("<｜tool▁sep｜>", "<minimax:tool_call>", "</minimax:tool_call>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<tool_calls>", "</tool_calls>"),
    *("<|action_start|>", "<|plugin|>", "<|action_end|>", "<function_calls>", "<function_call>"),
    *("<seed:tool_call>", "</seed:tool_call>", "<|tool_calls_section_begin|>"),
    *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    *("<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"),
)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


class Oracle:
    """A tokenizer with markers as added tokens, or without, and llguidance on it."""

    def __init__(self, folder: Path, *markers: str, special: bool = True) -> None:
        tiny_tokenizer.save(folder, *markers)
        path = folder / "tokenizer.json"
        if not special:
            spec = json.loads(path.read_text())
            for token in spec["added_tokens"]:
                token["special"] &= token["content"] not in markers
            path.write_text(json.dumps(spec))
        self.tokenizer = Tokenizer.load(folder)
        self._lark = tokenizer_of(path, self.tokenizer.size, [tiny_tokenizer.EOS_ID])

    @classmethod
    def of_kind(cls, folder: Path, kind: str) -> Oracle:
        """One whose markers are `special`, `added` and not special, or `spelled` as text."""
        return cls(folder, *(MARKERS if kind != "spelled" else ()), special=kind == "special")

    def compile(self, source: str) -> None:
        """Compile a source as ranks do. Raise InvalidRequest."""
        matcher_of(self._lark, source)

    def accepts(self, source: str, text: str) -> bool:
        """Whether a whole text belongs to a language."""
        matcher = LLMatcher(self._lark, source)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode_now(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def written(
        self, prompt: str, reasoning: str | None = None, tools: str | None = None
    ) -> Format:
        """How a model writes behind a prompt."""
        tool = {"weather": CITY} if tools else {}
        parser = REASONING_PARSERS.get(reasoning)(prompt, tool) if reasoning else None
        return Format(reasoning, tools, parser, self.tokenizer.in_grammars)
