"""What the requests of a step's windows ask of sampling, as columns for the device.

Everything is sent with every step: nothing about a request's wishes is kept on the device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from surestep_kernels.choose import DrawParams
from surestep_kernels.commit_step import StopIds
from surestep_kernels.shape_logits import Biases, Forbidden, Penalties
from surestep_proto import engine_pb2 as pb

from surestep_worker.plan import IntArray

from .upload import Int32Array

_NEVER = np.iinfo(np.int32).max
_WHOLE = ("seed_low", "seed_high", "top_k")  # columns of integers
_NO_WISHES = pb.SamplingParams(top_p=1, repetition_penalty=1)


class Wishes(NamedTuple):
    """Of a step with V windows and N positions; arrays, None where nobody asks."""

    draw: DrawParams
    stops: StopIds
    biases: Biases | None
    penalties: Penalties | None
    forbidden: Forbidden | None
    random: bool  # some window draws
    truncated: bool  # and restricts what it draws from


class WishBook:
    """Sampling parameters of every slot; the NULL slot, behind them, wishes nothing."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size, lines = vocab_size, num_slots + 1
        self._params = [_NO_WISHES] * lines
        self._truncates = np.zeros(lines, dtype=np.bool_)
        self._prompt_len = np.zeros(lines, dtype=np.int64)
        self._draw: dict[str, Any] = {
            name: np.zeros(lines, np.int32 if name in _WHOLE else np.float32)
            for name in DrawParams._fields
        }

    def admit(self, admission: pb.Admission) -> None:
        """A request moves into its slot."""
        self._set(admission.slot, admission.sampling, admission.prompt_len)

    def imagine(self, params: pb.SamplingParams | None) -> None:
        """The NULL slot wishes this; None = nothing again."""
        self._set(len(self._params) - 1, params or _NO_WISHES, 0)

    def _set(self, slot: int, params: pb.SamplingParams, prompt_len: int) -> None:
        self._params[slot], self._prompt_len[slot] = params, prompt_len
        self._truncates[slot] = params.min_p > 0 or params.top_k > 0 or params.top_p < 1
        values = (
            params.temperature,
            _signed(params.seed & 0xFFFFFFFF),
            _signed(params.seed >> 32),
            -math.log(params.min_p) if params.min_p > 0 else math.inf,
            min(params.top_k or self._vocab_size, self._vocab_size),
            params.top_p if params.top_p < 1 else math.inf,
        )
        for column, value in zip(self._draw.values(), values, strict=True):
            column[slot] = value

    def draw(self, slots: IntArray) -> DrawParams:
        """How the tokens of these slots are drawn."""
        return DrawParams(*(column[slots] for column in self._draw.values()))

    def of(self, slots: IntArray, position_window: Int32Array) -> Wishes:
        """What windows [V] ask for, in these slots; position_window [N]."""
        params = [self._params[slot] for slot in slots.tolist()]
        prompt_len = self._prompt_len[slots]
        draw = self.draw(slots)
        draws = draw.temperature > 0
        return Wishes(
            draw=draw,
            stops=StopIds(*_ragged([list(p.stop_token_ids) for p in params])),
            biases=_biases(params, position_window),
            penalties=_penalties(params, prompt_len, position_window),
            forbidden=_forbidden(params, prompt_len, position_window),
            random=bool(draws.any()),
            truncated=bool((draws & self._truncates[slots]).any()),
        )


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _which(windows: list[bool], position_window: Int32Array) -> Any:
    """Positions of these windows i32[P]; None if there are none."""
    chosen = np.array(windows, dtype=np.bool_)
    return np.flatnonzero(chosen[position_window]).astype(np.int32) if chosen.any() else None


def _ragged(lists: list[list[int]]) -> tuple[Any, Any]:
    """cu i32[V+1] and the lists behind each other i32[..]."""
    cu = np.cumsum([0, *map(len, lists)], dtype=np.int32)
    return cu, np.array([x for some in lists for x in some], dtype=np.int32)


def _biases(params: list[pb.SamplingParams], position_window: Int32Array) -> Biases | None:
    which = _which([bool(p.logit_bias or p.allowed_token_ids) for p in params], position_window)
    if which is None:
        return None
    ids = [sorted(set(p.allowed_token_ids) or set(p.logit_bias)) for p in params]
    values: Any = np.array(
        [p.logit_bias.get(i, 0.0) for p, some in zip(params, ids, strict=True) for i in some],
        dtype=np.float32,
    )
    only: Any = np.array([bool(p.allowed_token_ids) for p in params], dtype=np.int32)
    return Biases(which, *_ragged(ids), values, only)


def _penalties(
    params: list[pb.SamplingParams], prompt_len: IntArray, position_window: Int32Array
) -> Penalties | None:
    asked = [
        p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        for p in params
    ]
    which = _which(asked, position_window)
    if which is None:
        return None
    factors: Any = np.array(
        [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params],
        dtype=np.float32,
    ).T.copy()
    length: Any = prompt_len.astype(np.int32)
    return Penalties(which, length, *factors)


def _forbidden(
    params: list[pb.SamplingParams], prompt_len: IntArray, position_window: Int32Array
) -> Forbidden | None:
    sequences, until = list[list[list[int]]](), list[int]()
    for p, length in zip(params, prompt_len.tolist(), strict=True):
        early = [[i] for i in p.stop_token_ids] if p.min_tokens else []
        words = [list(word.token_ids) for word in p.bad_words]
        sequences.append(early + words)
        until += [length + p.min_tokens] * len(early) + [_NEVER] * len(words)
    which = _which([bool(some) for some in sequences], position_window)
    if which is None:
        return None
    cu: Any = np.cumsum([0, *map(len, sequences)], dtype=np.int32)
    bounds: Any = np.array(until, dtype=np.int64).clip(max=_NEVER).astype(np.int32)
    first: Any = prompt_len.astype(np.int32)
    return Forbidden(which, cu, *_ragged([s for some in sequences for s in some]), bounds, first)
