"""A hash in place of a language model, and drafters for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from surestep_common.request_params import neutral
from surestep_proto import sampling_pb2 as pb
from surestep_proto import worker_pb2

_MASK = (1 << 64) - 1
ROOT = 0x9E3779B97F4A7C15
_CHUNKED = 1 << 40  # beyond every token


def advance(state: int, token: int) -> int:
    """KV content of a position from that of its predecessor."""
    mixed = ((state ^ (token + 1)) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ (mixed >> 29)


def pooled(states: Sequence[int], pooling: int, labels: Sequence[int]) -> bytes:
    """A vector of two elements, given the KV content of the computed positions of a prompt.

    With labels it has one element for each.
    """
    if pooling == pb.LABEL_LOGITS:
        logits = [advance(states[-1], label) >> 40 for label in labels]
        return np.array(logits, dtype="<f4").tobytes()
    states = states[-1:] if pooling == pb.LAST_TOKEN else states
    rows = np.array([(state >> 40, state & 0xFFFF) for state in states], dtype=np.float64)
    return bytes(rows.mean(axis=0).astype("<f4").tobytes())


@dataclass(frozen=True, kw_only=True)
class FakeModel:
    """Sizes, as in WorkerInfo."""

    vocab_size: int = 101
    num_slots: int = 16
    num_blocks: int = 128
    block_size: int = 4
    kv_windows: tuple[int, ...] = (0,)  # by KV group; 0 = all positions are seen
    max_model_len: int = 128
    max_step_tokens: int = 256
    max_draft_tokens: int = 3
    drafter_has_state: bool = False
    drafter_looks_up: bool = False  # in half of the windows
    recurrent: bool = False
    num_snapshots: int = 0
    prompt_chunk: int = 1
    fingerprint: str = "fake"
    salt: int = 0  # another one is another model
    headless: bool = False
    eos_token_ids: tuple[int, ...] = ()
    defaults: pb.SamplingDefaults = field(default_factory=neutral)

    def choose(self, state: int, sampling: pb.SamplingParams) -> int:
        """The next token, given the KV content of the newest one."""
        mixed = advance(state, sampling.seed & 0xFFFF) >> 17
        return (mixed + self.salt) % self.vocab_size

    def mark(self, tokens: Sequence[int], prompt_len: int) -> list[int]:
        """A token in a whole chunk of a prompt is not quite the same as one that goes alone."""
        chunked = prompt_len // self.prompt_chunk * self.prompt_chunk * (self.prompt_chunk > 1)
        return [token + _CHUNKED * (i < chunked) for i, token in enumerate(tokens)]

    def vector(self, prompt: Sequence[int], pooling: int, labels: Sequence[int] = ()) -> bytes:
        """What a request for a vector must get, by direct evaluation."""
        marked = self.mark(prompt, len(prompt))
        return pooled(list(accumulate(marked, advance, initial=ROOT))[1:], pooling, labels)

    def complete(
        self,
        known: Sequence[int],
        max_tokens: int,
        sampling: pb.SamplingParams,
        prompt_len: int | None = None,
    ) -> list[int]:
        """What a request must emit, by direct evaluation; all it knows is prompt unless said."""
        prompt, state, emitted = known, ROOT, list[int]()
        for token in self.mark(known, len(known) if prompt_len is None else prompt_len):
            state = advance(state, token)
        room = min(max_tokens, self.max_model_len - len(prompt))
        while len(emitted) < room and not (emitted and emitted[-1] in sampling.stop_token_ids):
            emitted.append(self.choose(state, sampling))
            state = advance(state, emitted[-1])
        return emitted


Drafter = Callable[[random.Random, list[int]], list[int]]  # the right drafts -> what is proposed
StatusOf = Callable[[str, int], "worker_pb2.RowStatus"]  # request id, known tokens -> RowStatus


def ragged(accuracy: float) -> Drafter:
    """Any number of drafts, each right with probability `accuracy`."""

    def draft(rng: random.Random, right: list[int]) -> list[int]:
        count = rng.randint(0, len(right))
        return [token if rng.random() < accuracy else token ^ 1 for token in right[:count]]

    return draft
