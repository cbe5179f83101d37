"""The sampling parameters of a step's windows, as columns for the device.

They are sent with every step: the device keeps nothing about a request's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from surestep_common.invariants import BoolArray, FloatArray, Int32Array, IntArray
from surestep_kernels.choose import DrawParams
from surestep_kernels.commit_step import StopIds
from surestep_kernels.shape_logits import Biases, Forbidden, Penalties, Shaping
from surestep_kernels.step_columns import HostColumn
from surestep_proto import sampling_pb2 as pb

T = TypeVar("T")
Number = TypeVar("Number", np.int32, np.float32)

_NEVER = np.iinfo(np.int32).max
_NEUTRAL = pb.SamplingParams(top_p=1, repetition_penalty=1)
_PENALTIES = [f"{column}_penalty" for column in Penalties._fields[2:]]


class _Entry(NamedTuple):
    """A request's sampling parameters, prepared at its admission."""

    stops: Int32Array
    bias_ids: Int32Array
    bias_values: FloatArray
    only_those: bool  # no other token may be chosen
    penalties: list[float]  # in the order of the columns
    forbidden: Int32Array  # the ids of all sequences, concatenated
    lengths: Int32Array  # of each sequence
    until: Int32Array  # history length from which each is allowed
    prompt_len: int

    @classmethod
    def of(cls, params: pb.SamplingParams, prompt_len: int) -> _Entry:
        ids, values = _logit_changes(params)
        stops = _words(params.stop_token_ids)
        # A grammar bars them itself, as long as it can go on without.
        early = stops if params.min_tokens and not params.HasField("grammar") else stops[:0]
        counts = [len(word.token_ids) for word in params.bad_words]
        first_end = min(prompt_len + params.min_tokens, _NEVER)
        return cls(
            stops=stops,
            bias_ids=ids,
            bias_values=values,
            only_those=bool(params.allowed_token_ids),
            penalties=[getattr(params, name) for name in _PENALTIES],
            forbidden=np.concatenate(
                [early, *(_words(word.token_ids) for word in params.bad_words)]
            ),
            lengths=_words([1] * len(early) + counts),
            until=_words([first_end] * len(early) + [_NEVER] * len(counts)),
            prompt_len=prompt_len,
        )


def _logit_changes(params: pb.SamplingParams) -> tuple[Int32Array, FloatArray]:
    """Return the ids whose logits are changed or allowed, ascending, and what is added to each."""
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
    """Sampling parameters of every slot; those of the NULL slot, the last one, change nothing."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size, lines = vocab_size, num_slots + 1
        self.logprobs = LogprobParams(num_slots)
        self._neutral = _Entry.of(_NEUTRAL, 0)
        self._entries = [self._neutral] * lines
        # Which slots have any of these: a step without such slots skips them.
        self._biased, self._penalised, self._forbidden, self._truncates = np.zeros(
            (4, lines), dtype=np.bool_
        )
        self._draw: DrawParams[HostColumn] = DrawParams(
            temperature=np.zeros(lines, dtype=np.float32),
            seed_low=np.zeros(lines, dtype=np.int32),
            seed_high=np.zeros(lines, dtype=np.int32),
            max_gap=np.zeros(lines, dtype=np.float32),
            top_k=np.zeros(lines, dtype=np.int32),
            top_p=np.zeros(lines, dtype=np.float32),
        )

    def admit(self, slot: int, params: pb.SamplingParams, prompt_len: int) -> None:
        """Set the parameters of a slot, for a request with `prompt_len` tokens of prompt."""
        self.logprobs.admit(slot, params)
        self._set(slot, params, prompt_len)

    def free(self, slot: int) -> None:
        """Stop reporting log-probabilities of a slot. Freeing a free slot is harmless."""
        self.logprobs.free(slot)

    def set_dummy(self, params: pb.SamplingParams | None) -> None:
        """Set the parameters of the NULL slot; None sets back those that change nothing."""
        self._set(len(self._entries) - 1, params or _NEUTRAL, 0)

    def _set(self, slot: int, params: pb.SamplingParams, prompt_len: int) -> None:
        self._entries[slot] = entry = _Entry.of(params, prompt_len)
        self._biased[slot] = len(entry.bias_ids)
        self._penalised[slot] = entry.penalties != self._neutral.penalties
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
        for column, value in zip(self._draw, values, strict=True):
            column[slot] = value

    def draw(self, slots: IntArray) -> DrawParams[HostColumn]:
        """Return how the tokens of slots [R] are drawn."""
        return DrawParams(*(column[slots] for column in self._draw))

    def draws(self, slots: IntArray) -> BoolArray:
        """Return which of slots [R] draw; the others are greedy."""
        draws: BoolArray = self._draw.temperature[slots] > 0
        return draws

    def draw_flags(self, slots: IntArray) -> tuple[bool, bool]:
        """Return whether any of these slots draws, and whether any restricts what it draws from."""
        draws = self.draws(slots)
        return bool(draws.any()), bool((draws & self._truncates[slots]).any())

    def stops(self, slots: IntArray) -> StopIds[HostColumn]:
        """Return the ids that end the requests in slots [V]."""
        return StopIds(*_ragged([self._entries[slot].stops for slot in slots.tolist()]))

    def shaping(self, slots: IntArray, position_window: Int32Array) -> Shaping[HostColumn]:
        """Return how windows in slots [V] shape the logits of positions with these windows [N]."""

        def some(make: Callable[[Int32Array, list[_Entry]], T], has: BoolArray) -> T | None:
            """Make columns for the positions i32[P] whose slots have any; None if none has."""
            windows = has[slots]
            if not windows.any():
                return None
            entries = [self._entries[slot] for slot in slots.tolist()]
            return make(np.flatnonzero(windows[position_window]).astype(np.int32), entries)

        return Shaping(
            biases=some(_biases, self._biased),
            penalties=some(_penalties, self._penalised),
            forbidden=some(_forbidden, self._forbidden),
        )


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _words(values: Any) -> Int32Array:
    """Return words of anything that numpy makes an array of, such as a message's column."""
    return np.array(values, dtype=np.int32)


def _joined(parts: Sequence[npt.NDArray[Number]], dtype: type[Number]) -> npt.NDArray[Number]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _ragged(parts: Sequence[Int32Array]) -> tuple[Int32Array, Int32Array]:
    """Return cu i32[V+1] and the concatenated parts i32[..]."""
    return _bounds([len(part) for part in parts]), _joined(parts, np.int32)


def _bounds(counts: Sequence[int] | Int32Array) -> Int32Array:
    bounds = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def _biases(which: Int32Array, entries: Sequence[_Entry]) -> Biases[HostColumn]:
    cu, ids = _ragged([w.bias_ids for w in entries])
    values = _joined([w.bias_values for w in entries], np.float32)
    return Biases(which, cu, ids, values, _words([w.only_those for w in entries]))


def _penalties(which: Int32Array, entries: Sequence[_Entry]) -> Penalties[HostColumn]:
    factors = np.array([w.penalties for w in entries], dtype=np.float32).T.copy()
    return Penalties(which, _words([w.prompt_len for w in entries]), *factors)


def _forbidden(which: Int32Array, entries: Sequence[_Entry]) -> Forbidden[Int32Array]:
    return Forbidden(
        which,
        _bounds([len(w.lengths) for w in entries]),
        _bounds(_joined([w.lengths for w in entries], np.int32)),
        _joined([w.forbidden for w in entries], np.int32),
        until=_joined([w.until for w in entries], np.int32),
        first=_words([w.prompt_len for w in entries]),
    )


class LogprobParams:
    """Log-probabilities that each slot has reported, with how many alternatives.

    The NULL slot has none.
    """

    def __init__(self, num_slots: int) -> None:
        self.emitted, self.prompt = np.zeros((2, num_slots + 1), dtype=np.bool_)
        self.num_top, self.num_top_prompt = np.zeros((2, num_slots + 1), dtype=np.int64)

    @property
    def wanted(self) -> bool:
        """Return whether any slot has log-probabilities reported."""
        return bool(self.emitted.any() or self.prompt.any())

    def admit(self, slot: int, params: pb.SamplingParams) -> None:
        self.emitted[slot] = params.want_logprobs
        self.prompt[slot] = params.want_prompt_logprobs
        self.num_top[slot] = params.num_top_logprobs
        self.num_top_prompt[slot] = params.num_top_prompt_logprobs

    def free(self, slot: int) -> None:
        self.emitted[slot] = self.prompt[slot] = False
