"""Log-probabilities: from the wire's columns to the formats of the OpenAI API and of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from surestep_gateway.generation.detokenize import Detokenizer
from surestep_gateway.generation.sequence import Position, TokenLogprob
from surestep_gateway.text.tokenizer import Tokenizer

Json = dict[str, Any]


class TokenSpeller:
    """Formats single tokens: as text, or as `token_id:N` where a client asked for that."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """Return the token's text; part of a character becomes U+FFFD, `data` has its bytes."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.piece(token_id).decode("utf-8", "replace")

    def data(self, token_id: int) -> list[int]:
        """Return the token's bytes; those of several tokens together form whole characters."""
        return list(self._tokenizer.piece(token_id))


def chat_logprobs(found: Sequence[Position], speller: TokenSpeller) -> Json:
    """Return the `logprobs` object of a chat choice."""

    def entry(candidate: TokenLogprob) -> Json:
        return {
            "token": speller.text(candidate.token_id),
            "logprob": candidate.logprob,
            "bytes": speller.data(candidate.token_id),
        }

    return {
        "content": [
            entry(position.chosen) | {"top_logprobs": [entry(one) for one in position.top]}
            for position in found
        ]
    }


class TextOfTokens:
    """A text made of tokens, from offset `start` on: each token begins where the last one ends."""

    def __init__(self, detokenizer: Detokenizer, *, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._end = start

    def place(self, token_id: int) -> int:
        """Return the offset of the next token."""
        at = self._end
        self._end += len(self._detokenizer.push(token_id))
        return at


class TextOfClient:
    """A text that a client wrote; its tokens are that text but for what tokenizers add.

    That is special tokens around it, and spaces at its beginning and behind special tokens.
    """

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        self._end = 0

    def place(self, token_id: int) -> int:
        """Return the offset of the next token; a token that is not in the text has no length."""
        at, spelled = self._end, self._detokenizer.push(token_id)
        if not self._text.startswith(spelled, at):
            spelled = spelled.removeprefix(" ")
        if self._text.startswith(spelled, at) or not self._tokenizer.is_special(token_id):
            self._end = min(at + len(spelled), len(self._text))
        return at


class CompletionLogprobs:
    """Builds the `logprobs` objects of a completion choice; offsets continue between calls."""

    def __init__(self, speller: TokenSpeller, text: TextOfTokens | TextOfClient) -> None:
        self._speller = speller
        self._text = text

    def build(self, found: Sequence[Position | int]) -> Json:
        """Return the object. An int is a token without log-probability: the first of an echoed
        prompt.
        """
        shape: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in found:
            token_id = one if isinstance(one, int) else one.chosen.token_id
            shape["tokens"].append(self._speller.text(token_id))
            shape["token_logprobs"].append(None if isinstance(one, int) else one.chosen.logprob)
            shape["top_logprobs"].append(None if isinstance(one, int) else self._top(one))
            shape["text_offset"].append(self._text.place(token_id))
        return shape

    def _top(self, position: Position) -> dict[str, float]:
        # Two tokens may be shown alike; the likelier one stays.
        top: dict[str, float] = {}
        for candidate in (*position.top, position.chosen):
            top.setdefault(self._speller.text(candidate.token_id), candidate.logprob)
        return top


def prompt_logprobs(found: Sequence[Position], spell: Callable[[int], str]) -> list[Json]:
    """Return vLLM's `prompt_logprobs` by token id; null for the first token of a prompt."""

    def entries(position: Position) -> Json:
        shown: Json = {}
        ranked = [(rank, one) for rank, one in enumerate(position.top, start=1)]
        for rank, one in [(position.rank, position.chosen), *ranked]:
            shown.setdefault(
                str(one.token_id),
                {"logprob": one.logprob, "rank": rank, "decoded_token": spell(one.token_id)},
            )
        return shown

    return list(map(entries, found))
