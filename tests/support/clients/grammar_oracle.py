"""What belongs to the language of an output, token by token."""

from __future__ import annotations

from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from support.checkpoints import tiny_tokenizer
from surestep_gateway.grammars.reasoning import Format
from surestep_gateway.parsers import REASONING_PARSERS
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_worker.grammar.matcher import matcher_of

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
)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


class Oracle:
    """A tokenizer with markers as special tokens, or without, and llguidance on it."""

    def __init__(self, folder: Path, *special: str) -> None:
        tiny_tokenizer.save(folder, *special)
        self.tokenizer = Tokenizer.load(folder)
        path = str(folder / "tokenizer.json")
        self._lark = LLTokenizer(path, eos_token=tiny_tokenizer.EOS_ID)

    def compile(self, source: str) -> None:
        """Compile a source as ranks do. Raise InvalidRequest."""
        matcher_of(self._lark, source)

    def special(self, text: str) -> bool:
        """Whether a text is a special token."""
        found = self.tokenizer.id(text)
        return found is not None and self.tokenizer.is_special(found)

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
        return Format(reasoning, tools, parser, self.special)
