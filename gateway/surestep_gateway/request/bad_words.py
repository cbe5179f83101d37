"""bad_words: from words to token ids, bounded in number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from surestep_common.errors import InvalidRequest
from surestep_common.request_bounds import most_bad_word_ids
from surestep_proto.sampling_pb2 import TokenSequence

from surestep_gateway.text.tokenizer import Texts, Tokenizer

MAX_CHARS = 1 << 15  # of all words together

_PIECE_CHARS = 4096  # tokenised together; whatever is too much shows after one of them


def total_chars(words: Sequence[str]) -> int:
    return sum(map(len, words))


def bad_words(
    words: Sequence[str], tokenizer: Tokenizer, num_sequences: int
) -> list[TokenSequence]:
    """Return the token ids of each word at the start of a text, and after a space.

    Raise InvalidRequest for more than a request with so many sequences may have.
    """
    num_chars = total_chars(words)
    if num_chars > MAX_CHARS:
        raise _refusal(f"{num_chars} characters are more than {MAX_CHARS}")
    found: list[TokenSequence] = []
    left = most = most_bad_word_ids(num_sequences)
    for piece in _pieces(words):
        bare = [word.lstrip() for word in piece]
        spellings = [*bare, *(" " + word for word in bare)]
        ids = tokenizer.encode(Texts(spellings, add_special_tokens=False))
        for word, first, spaced in zip(piece, ids, ids[len(piece) :], strict=False):
            if not first:
                raise _refusal(f"'{word}' has no tokens")
            spelt = [first] if spaced == first else [first, spaced]
            left -= sum(map(len, spelt))
            if left < 0:
                raise _refusal(f"more than {most} tokens, for {num_sequences} sequences")
            found += [TokenSequence(token_ids=one) for one in spelt]
    return found


def _pieces(words: Sequence[str]) -> Iterator[list[str]]:
    piece: list[str] = []
    num_chars = 0
    for word in words:
        if piece and num_chars + len(word) > _PIECE_CHARS:
            yield piece
            piece, num_chars = [], 0
        piece.append(word)
        num_chars += len(word)
    if piece:
        yield piece


def _refusal(what: str) -> InvalidRequest:
    return InvalidRequest(f"bad_words: {what}", param="bad_words")
