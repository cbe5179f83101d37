"""Parameters of a request: their bounds, ranges and defaults, and the seeds of siblings.

The gateway, the scheduler and every rank check them. Whatever a step or an admission does for a
request is proportional to one of these counts, so that no request that is admitted can keep a
process from its other work. Counts are looked at before anything is copied or gone through.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from surestep_proto.sampling_pb2 import (
    LABEL_LOGITS,
    Grammar,
    Pooling,
    SamplingDefaults,
    SamplingParams,
)

from .errors import InvalidRequest, RequestTooLarge

MAX_REQUEST_BYTES = 8 << 20  # of a GenerateRequest: a prompt of 2 million ids and all that is below
MAX_PLAN_BYTES = 16 << 20  # of a StepPlan
ROWS_BYTES = 1 << 20  # of them for everything in a plan that is no admission

MAX_NAME_BYTES = 512  # of a request's id, its cache_owner and cache_salt, its tenant
MAX_STOP_IDS = 2048  # of the model and of the request together
MAX_BIASES = 1024
MAX_BAD_WORDS = 2048  # sequences: a word may have two spellings
MAX_BAD_WORD_IDS = 1 << 14  # in all of them
MAX_ALLOWED_IDS = 1 << 18  # more than the largest vocabulary has
MAX_ENTRIES = 1 << 20  # of all these lists, times the sequences that the request asks for
MAX_GRAMMAR_BYTES = 1 << 18  # of a grammar's source: a set of tools with their schemas
# Between two tokens of JSON, as a pattern: a model may write nothing else for ever.
JSON_WHITE_SPACE = r"[ \t\n\r]{0,32}"
MAX_CHOICES = 4096  # texts of which an output may be one
MAX_LABELS = 64  # tokens whose logits are a vector
MAX_BEGINS_AFTER = 16  # tokens of the end of reasoning
MAX_PROMPT_LOGPROBS = 1 << 18  # prompt tokens times alternatives

LEAST_REPETITION, MOST_REPETITION = 0.01, 100.0  # of the penalty: beyond them logits overflow
MOST_PENALTY = 2.0  # for presence and for frequency, either way

MAX_LOGPROBS = 128  # alternatives per token
_MASK64 = (1 << 64) - 1
_SINGLE = struct.Struct("f")
_GOLDEN = 0x9E3779B97F4A7C15
# Fields of SamplingParams that a model may have defaults for.
SHAPING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_DIGITS = 6  # that a number keeps on the wire, in single precision


class Entries(NamedTuple):
    """Lengths of a request's lists."""

    stop_token_ids: int
    logit_bias: int
    bad_words: int  # ids in all of them
    allowed_token_ids: int

    @classmethod
    def of(cls, sampling: SamplingParams) -> Entries:
        """Raises InvalidRequest for more bad words than are gone through."""
        _require("bad_words", len(sampling.bad_words), MAX_BAD_WORDS, "sequences")
        return cls(
            len(sampling.stop_token_ids),
            len(sampling.logit_bias),
            sum(len(word.token_ids) for word in sampling.bad_words),
            len(sampling.allowed_token_ids),
        )


_MOST = Entries(MAX_STOP_IDS, MAX_BIASES, MAX_BAD_WORD_IDS, MAX_ALLOWED_IDS)


def check_entries(sampling: SamplingParams, num_sequences: int = 1) -> None:
    """Raise InvalidRequest or RequestTooLarge naming the parameter that asks for too much."""
    entries = Entries.of(sampling)
    for name, count, most in zip(Entries._fields, entries, _MOST, strict=True):
        _require(name, count, most, "token ids")
    if sum(entries) * num_sequences > MAX_ENTRIES:
        longest = max(Entries._fields, key=lambda name: int(getattr(entries, name)))
        raise RequestTooLarge(
            f"{longest}: {sum(entries)} token ids in the lists of a request with {num_sequences} "
            f"sequences are more than {MAX_ENTRIES} together",
            param=longest,
        )


def most_bad_word_ids(num_sequences: int) -> int:
    """Return how many token ids the bad words of a request with so many sequences may have."""
    return min(MAX_BAD_WORD_IDS, MAX_ENTRIES // num_sequences)


def check_prompt_logprobs(sampling: SamplingParams, prompt_len: int) -> None:
    """Raise RequestTooLarge when they would be more than fit into an answer."""
    if not sampling.want_prompt_logprobs:
        return
    count = prompt_len * (1 + sampling.num_top_prompt_logprobs)
    if count > MAX_PROMPT_LOGPROBS:
        raise RequestTooLarge(
            f"{count} log-probabilities of a prompt of {prompt_len} tokens are more than "
            f"{MAX_PROMPT_LOGPROBS}",
            param="prompt_logprobs",
        )


def check_grammar(grammar: Grammar) -> None:
    """Raise InvalidRequest for a grammar that is empty or too long to be compiled."""
    if not grammar.source:
        raise InvalidRequest("the grammar is empty", param="grammar")
    _require("grammar", len(grammar.source.encode()), MAX_GRAMMAR_BYTES, "bytes")
    _require("grammar", len(grammar.begins_after), MAX_BEGINS_AFTER, "ids in begins_after")


def check_labels(pooling: Pooling, label_ids: Sequence[int]) -> None:
    """Raise InvalidRequest for labels where none are read, and for none or too many elsewhere."""
    if (pooling == LABEL_LOGITS) != bool(label_ids):
        raise InvalidRequest("label_ids and LABEL_LOGITS go together", param="label_ids")
    _require("label_ids", len(label_ids), MAX_LABELS, "token ids")


def check_name(param: str, name: str) -> None:
    """Raise InvalidRequest for an id, an owner, a salt or a tenant that is too long."""
    _require(param, len(name.encode()), MAX_NAME_BYTES, "bytes")


def admission_bytes(
    num_tokens: int, num_blocks: int, sampling_bytes: int, *, vocab_size: int, pool_size: int
) -> int:
    """Return the most bytes that the admission of a request takes in a plan.

    It has `num_tokens` known ids below `vocab_size`, and `num_blocks` blocks out of `pool_size`.
    """
    ids = num_tokens * _varint_bytes(vocab_size - 1) + num_blocks * _varint_bytes(pool_size - 1)
    return ids + sampling_bytes + MAX_NAME_BYTES + 128  # the rest are a dozen numbers


def _varint_bytes(value: int) -> int:
    """Return the bytes of a number on the wire (Protocol Buffers, "Base 128 Varints")."""
    return max(1, -(-value.bit_length() // 7))


def _require(param: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise InvalidRequest(f"{param}: {count} {what} are more than {most}", param=param)


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest or RequestTooLarge naming the parameter that is out of range."""
    check_entries(sampling)
    _check_numbers(sampling)
    _check_ids(sampling, vocab_size)
    if sampling.HasField("grammar"):
        check_grammar(sampling.grammar)
        check_vocab("grammar", sampling.grammar.begins_after, vocab_size)


def shapes_logits(sampling: SamplingParams) -> bool:
    """Return whether the request has the model's logits changed before a token is chosen."""
    return bool(
        sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words
        or (sampling.min_tokens and sampling.stop_token_ids)
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.HasField("grammar")
    )


def _check_numbers(sampling: SamplingParams) -> None:
    for name, low, high in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", LEAST_REPETITION, MOST_REPETITION),
        ("presence_penalty", -MOST_PENALTY, MOST_PENALTY),
        ("frequency_penalty", -MOST_PENALTY, MOST_PENALTY),
        ("num_top_logprobs", 0, MAX_LOGPROBS),
        ("num_top_prompt_logprobs", 0, MAX_LOGPROBS),
    ):
        value = getattr(sampling, name)
        if not (_single(low) <= value <= high and math.isfinite(value)):
            raise InvalidRequest(f"{name} is {value:g}, not in [{low:g}, {high:g}]", param=name)
    if sampling.top_p == 0:
        raise InvalidRequest("top_p must be above 0; 1 turns it off", param="top_p")
    if any(not math.isfinite(bias) for bias in sampling.logit_bias.values()):
        raise InvalidRequest("logit_bias holds a value that is not finite", param="logit_bias")


def _single(bound: float) -> float:
    """Return a bound as the wire carries it: 0.01 in single precision is a little less."""
    (single,) = _SINGLE.unpack(_SINGLE.pack(bound))
    return float(single)


def _check_ids(sampling: SamplingParams, vocab_size: int) -> None:
    check_vocab("stop_token_ids", sampling.stop_token_ids, vocab_size)
    check_vocab("logit_bias", list(sampling.logit_bias), vocab_size)
    check_vocab("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    if not all(word.token_ids for word in sampling.bad_words):
        raise InvalidRequest("bad_words holds an empty sequence", param="bad_words")
    ids = chain.from_iterable(word.token_ids for word in sampling.bad_words)
    check_vocab("bad_words", list(ids), vocab_size)


def check_vocab(param: str, ids: Sequence[int] | Any, vocab_size: int) -> None:
    """Raise InvalidRequest when one of the ids is outside the vocabulary.

    `ids` are whatever numpy makes an array of: a message's column without a look at each.
    """
    import numpy as np  # which a launcher does not wait for

    highest = int(np.asarray(ids).max(initial=0))
    if highest >= vocab_size:
        raise InvalidRequest(f"{param}: token id {highest} is not in the vocabulary", param=param)


def neutral() -> SamplingDefaults:
    """Return values that leave the model's own distribution alone."""
    return SamplingDefaults(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


def shown(defaults: SamplingDefaults) -> dict[str, float]:
    """Return what people and clients are shown; lengths that are not set are left out."""
    values = {name: round(getattr(defaults, name), _DIGITS) for name in SHAPING}
    lengths = {name: getattr(defaults, name) for name in ("max_tokens", "max_tokens_limit")}
    return values | {name: length for name, length in lengths.items() if length}


def sibling_seed(seed: int, sibling: int) -> int:
    """Return the seed of sequence `sibling` of a request: its own stream of noise.

    Sibling 0 has the request's seed, sibling i the i-th output of splitmix64 (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014) started there.
    """
    if sibling == 0:
        return seed & _MASK64
    z = (seed + sibling * _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
