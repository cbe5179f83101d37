"""bad_words: bounded before they are tokenised."""

from __future__ import annotations

import pytest
from surestep_common.errors import InvalidRequest, RequestTooLarge
from surestep_common.request_params import MAX_BAD_WORD_IDS, MAX_ENTRIES, check_entries
from surestep_gateway.request.prepared import MAX_CHARS, bad_words
from surestep_gateway.request.protocol import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS
from surestep_gateway.text.tokenizer import Texts, Tokenizer
from surestep_proto.sampling_pb2 import SamplingParams

WIDE = "\U0001d11e"  # four bytes of UTF-8, four tokens of a byte-level tokenizer


class Counting(Tokenizer):
    """Counts the characters that it has tokenised."""

    num_chars = 0

    def encode(self, texts: Texts) -> list[list[int]]:
        self.num_chars += texts.num_chars
        return super().encode(texts)


@pytest.fixture
def counting(tokenizer: Tokenizer) -> Counting:
    return Counting(vars(tokenizer)["_rust"])


def test_too_many_characters_are_not_tokenised_at_all(counting: Counting) -> None:
    """The request that kept a gateway busy for seconds and ended its scheduler."""
    words = [WIDE * MAX_BAD_WORD_CHARS] * MAX_BAD_WORDS
    with pytest.raises(InvalidRequest, match="262144 characters are more than 32768") as refusal:
        bad_words(words, counting, 128)
    assert refusal.value.param == "bad_words"
    assert counting.num_chars == 0


def test_too_many_tokens_are_noticed_on_the_way(counting: Counting) -> None:
    words = [WIDE * 200] * (MAX_CHARS // 200)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_BAD_WORD_IDS} tokens"):
        bad_words(words, counting, 1)
    assert counting.num_chars < 2 * 2 * 4096 + 200
    with pytest.raises(InvalidRequest, match="more than 1024 tokens, for 1024 sequences"):
        bad_words(words, counting, 1024)


def test_as_many_as_fit_fit(counting: Counting) -> None:
    words = [f"word{number:03}" for number in range(400)]
    found = bad_words(words, counting, 128)
    sampling = SamplingParams(bad_words=found)
    check_entries(sampling, 128)
    with pytest.raises((InvalidRequest, RequestTooLarge)):
        check_entries(sampling, 1 + MAX_ENTRIES // sum(len(word.token_ids) for word in found))


@pytest.mark.parametrize("count", [3, 300])
def test_many_are_spelled_as_few_are(tokenizer: Tokenizer, count: int) -> None:
    words = [f"dog{number}" for number in range(count)]
    together = bad_words(words, tokenizer, 1)
    alone = [spelt for word in words for spelt in bad_words([word], tokenizer, 1)]
    assert together == alone


def test_nothing_but_space_is_no_word(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="has no tokens"):
        bad_words(["  "], tokenizer, 1)
