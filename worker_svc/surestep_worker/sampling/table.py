"""What the requests of a step's windows ask of sampling, as columns for the device.

Everything is sent with every step: nothing about a request's entries is kept on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from surestep_common.invariants import FloatArray, Int32Array
from surestep_kernels.step.choose import DrawParams
from surestep_kernels.step.commit_step import StopIds
from surestep_kernels.step.shape_logits import Biases, Forbidden, Penalties
from surestep_proto import sampling_pb2 as pb

from surestep_worker.ledger.plan import BoolArray, IntArray

from .logprob_params import LogprobWants

T = TypeVar("T")

_NEVER = np.iinfo(np.int32).max
_WHOLE = ("seed_low", "seed_high", "top_k")  # columns of integers
_NEUTRAL = pb.SamplingParams(top_p=1, repetition_penalty=1)


class SamplingBatch(NamedTuple):
    """Of a step with V windows and N positions; arrays, None where nobody asks."""

    draw: DrawParams
    stops: StopIds
    biases: Biases | None
    penalties: Penalties | None
    forbidden: Forbidden | None
    random: bool  # some window draws
    truncated: bool  # and restricts what it draws from


class _Entry(NamedTuple):
    """What a request asks of sampling, made ready when it comes; most ask for little."""

    stops: Int32Array
    bias_ids: Int32Array
    bias_values: FloatArray
    only_those: bool  # no other token may be chosen
    penalties: tuple[float, float, float]  # repetition, presence, frequency
    forbidden: Int32Array  # the ids of all sequences, behind each other
    lengths: Int32Array  # of each sequence
    until: Int32Array  # history length from which each is allowed
    prompt_len: int

    @classmethod
    def of(cls, params: pb.SamplingParams, prompt_len: int) -> _Entry:
        ids, values = _listed(params)
        stops = _words(params.stop_token_ids)
        early = stops if params.min_tokens else stops[:0]
        counts = [len(word.token_ids) for word in params.bad_words]
        first_end = min(prompt_len + params.min_tokens, _NEVER)
        return cls(
            stops=stops,
            bias_ids=ids,
            bias_values=values,
            only_those=bool(params.allowed_token_ids),
            penalties=(
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            ),
            forbidden=_joined([early, *(_words(word.token_ids) for word in params.bad_words)]),
            lengths=_words([1] * len(early) + counts),
            until=_words([first_end] * len(early) + [_NEVER] * len(counts)),
            prompt_len=prompt_len,
        )


def _listed(params: pb.SamplingParams) -> tuple[Int32Array, FloatArray]:
    """Ids whose logits are changed or allowed, ascending, and what is added to each."""
    biased = np.array(sorted(params.logit_bias), dtype=np.int32)
    added = np.array([params.logit_bias[i] for i in biased.tolist()], dtype=np.float32)
    if not params.allowed_token_ids:
        return biased, added
    ids = np.unique(_words(params.allowed_token_ids))
    values = np.zeros(len(ids), dtype=np.float32)
    _, place, kept = np.intersect1d(ids, biased, assume_unique=True, return_indices=True)
    values[place] = added[kept]
    return ids, values


class SamplingTable:
    """Sampling parameters of every slot; the NULL slot, behind them, asks for nothing."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size, lines = vocab_size, num_slots + 1
        self.logprobs = LogprobWants(num_slots)
        self._entries = [_Entry.of(_NEUTRAL, 0)] * lines
        # Which slots have any of these: a step looks no further where none has.
        self._biased, self._penalised, self._forbidden, self._truncates = np.zeros(
            (4, lines), dtype=np.bool_
        )
        self._draw: dict[str, Any] = {
            name: np.zeros(lines, np.int32 if name in _WHOLE else np.float32)
            for name in DrawParams._fields
        }

    def admit(self, slot: int, params: pb.SamplingParams, prompt_len: int) -> None:
        """A request moves into a slot; so many tokens of its history are prompt."""
        self.logprobs.admit(slot, params)
        self._set(slot, params, prompt_len)

    def free(self, slot: int) -> None:
        """It has left. Freeing a free slot is harmless."""
        self.logprobs.free(slot)

    def set_dummy(self, params: pb.SamplingParams | None) -> None:
        """The NULL slot asks for this; None = nothing again."""
        self._set(len(self._entries) - 1, params or _NEUTRAL, 0)

    def _set(self, slot: int, params: pb.SamplingParams, prompt_len: int) -> None:
        self._entries[slot] = entry = _Entry.of(params, prompt_len)
        self._biased[slot] = len(entry.bias_ids)
        self._penalised[slot] = entry.penalties != (1, 0, 0)
        self._forbidden[slot] = len(entry.lengths)
        self._truncates[slot] = params.min_p > 0 or params.top_k > 0 or params.top_p < 1
        values = (
            params.temperature,
            _signed(params.seed & 0xFFFFFFFF),
            _signed(params.seed >> 32),
            0.0 - math.log(params.min_p) if params.min_p > 0 else math.inf,  # never -0: bits count
            min(params.top_k or self._vocab_size, self._vocab_size),
            params.top_p if params.top_p < 1 else math.inf,
        )
        for column, value in zip(self._draw.values(), values, strict=True):
            column[slot] = value

    def draw(self, slots: IntArray) -> DrawParams:
        """How the tokens of these slots are drawn."""
        return DrawParams(*(column[slots] for column in self._draw.values()))

    def draws(self, slots: IntArray) -> BoolArray:
        """Which of these slots draw: all others are greedy."""
        draws: BoolArray = self._draw["temperature"][slots] > 0
        return draws

    def asked(self, slots: IntArray) -> tuple[bool, bool]:
        """Whether some of these slots draw at all, and restrict what they draw from."""
        draws = self.draws(slots)
        return bool(draws.any()), bool((draws & self._truncates[slots]).any())

    def of(self, slots: IntArray, position_window: Int32Array) -> SamplingBatch:
        """What windows [V] ask for, in these slots; position_window [N]."""
        entries = [self._entries[slot] for slot in slots.tolist()]

        def made(make: Callable[[Any, Sequence[_Entry]], T], asked: BoolArray) -> T | None:
            """For the positions i32[P] of the windows that ask; None where nobody does."""
            some = asked[slots]
            if not some.any():
                return None
            return make(np.flatnonzero(some[position_window]).astype(np.int32), entries)

        random, truncated = self.asked(slots)
        return SamplingBatch(
            draw=self.draw(slots),
            stops=StopIds(*_ragged([entry.stops for entry in entries])),
            biases=made(_biases, self._biased),
            penalties=made(_penalties, self._penalised),
            forbidden=made(_forbid, self._forbidden),
            random=random,
            truncated=truncated,
        )


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _words(values: Any) -> Any:
    """Whatever numpy makes an array of, a message's column at once."""
    return np.array(values, dtype=np.int32)


def _joined(parts: Sequence[Any]) -> Any:
    """Behind each other; no part at all makes words."""
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def _ragged(parts: Sequence[Int32Array]) -> tuple[Any, Any]:
    """cu i32[V+1] and the parts behind each other i32[..]."""
    return _bounds([len(part) for part in parts]), _joined(parts)


def _bounds(counts: Any) -> Any:
    bounds = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def _biases(which: Any, entries: Sequence[_Entry]) -> Biases:
    cu, ids = _ragged([w.bias_ids for w in entries])
    values = _joined([w.bias_values for w in entries])
    return Biases(which, cu, ids, values, _words([w.only_those for w in entries]))


def _penalties(which: Any, entries: Sequence[_Entry]) -> Penalties:
    factors: Any = np.array([w.penalties for w in entries], dtype=np.float32).T.copy()
    return Penalties(which, _words([w.prompt_len for w in entries]), *factors)


def _forbid(which: Any, entries: Sequence[_Entry]) -> Forbidden:
    return Forbidden(
        which,
        _bounds([len(w.lengths) for w in entries]),
        _bounds(_joined([w.lengths for w in entries])),
        _joined([w.forbidden for w in entries]),
        until=_joined([w.until for w in entries]),
        first=_words([w.prompt_len for w in entries]),
    )
