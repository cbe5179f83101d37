"""Bounds on the work of one request: checked by the gateway, by the scheduler, and by every rank.

Whatever a step or an admission does for a request is proportional to one of these counts, so that
no request that is admitted can keep a process from its other work. Counts are looked at before
anything is copied or gone through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from surestep_proto.sampling_pb2 import LABEL_LOGITS, Grammar, Pooling, SamplingParams

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
