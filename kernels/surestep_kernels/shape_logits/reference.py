"""The changes of logits that requests specify: biases, penalties, tokens and sequences to avoid,
grammars.

The host sends the lists with every step, those of a window side by side; nothing is counted or kept
on the device, so nothing has to be undone when a draft is rejected.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol

import torch
from torch import Tensor

from surestep_kernels.choose import SATURATED
from surestep_kernels.step_columns import Column


class Positions(NamedTuple):
    """The N sampled positions of a step."""

    window: Tensor  # i32[N]
    slot: Tensor  # i32[N]
    length: Tensor  # i32[N] history: tokens[slot, :length], earlier drafts of the window included
    tokens: Tensor  # i32[S, W] token table


class Biases(NamedTuple, Generic[Column]):
    """logit_bias and allowed_token_ids, for the positions `which`."""

    which: Column  # i32[P] indices into the N positions
    cu: Column  # i32[V+1] the tokens of window w are ids[cu[w]:cu[w+1]]
    ids: Column  # i32[..] no id twice in a window
    values: Column  # f32[..] added to their logits
    only: Column  # i32[V] 1: no other token may be chosen


class Penalties(NamedTuple, Generic[Column]):
    """repetition_penalty (prompt and output), presence_ and frequency_penalty (output only)."""

    which: Column  # i32[P]
    prompt_len: Column  # i32[V]
    repetition: Column  # f32[V]
    presence: Column  # f32[V]
    frequency: Column  # f32[V]


class Forbidden(NamedTuple, Generic[Column]):
    """Sequences that must not be completed: stop ids before min_tokens, and bad words."""

    which: Column  # i32[P]
    cu: Column  # i32[V+1] the sequences of window w are cu[w]:cu[w+1]
    cu_ids: Column  # i32[..] sequence i is ids[cu_ids[i]:cu_ids[i+1]]
    ids: Column  # i32[..]
    until: Column  # i32[..] history length from which a sequence is allowed; i32 maximum = never
    first: Column  # i32[V] history before this index is ignored


class Masks(NamedTuple, Generic[Column]):
    """The tokens that grammars allow at the positions `which`."""

    which: Column  # i32[P]
    words: Column  # i32[P, ceil(vocabulary / 32)] bit i % 32 of word i // 32: token i is allowed


class Shaping(NamedTuple, Generic[Column]):
    """The changes of a step's logits; None where no request specifies any."""

    biases: Biases[Column] | None = None
    penalties: Penalties[Column] | None = None
    forbidden: Forbidden[Column] | None = None
    masks: Masks[Column] | None = None


class ShapeLogits(Protocol):
    def __call__(self, z: Tensor, positions: Positions, shaping: Shaping) -> None: ...


def shape_logits_reference(z: Tensor, positions: Positions, shaping: Shaping) -> None:
    """Change the logits z f32[N, V] in place: biases, penalties, forbidden tokens, then masks.

    A logit that is NaN or +inf stays NaN or +inf. One that was finite becomes SATURATED at most, so
    a row without usable logits shows whether the model or the request is at fault.
    """
    unusable = z.isnan() | z.isposinf()
    if shaping.biases is not None:
        _bias(z, positions, shaping.biases)
    if shaping.penalties is not None:
        _penalise(z, positions, shaping.penalties)
    if shaping.forbidden is not None:
        _forbid(z, positions, shaping.forbidden)
    if shaping.masks is not None:
        _mask(z, shaping.masks)
    z[unusable] = torch.nan


def _bias(z: Tensor, positions: Positions, biases: Biases) -> None:
    for n in biases.which.tolist():
        w = int(positions.window[n])
        span = slice(int(biases.cu[w]), int(biases.cu[w + 1]))
        ids = biases.ids[span].long()
        listed = (z[n, ids] + biases.values[span]).clamp(max=SATURATED)
        if biases.only[w]:
            z[n] = -torch.inf
        z[n, ids] = listed


def _penalise(z: Tensor, positions: Positions, penalties: Penalties) -> None:
    for n in penalties.which.tolist():
        w, length = int(positions.window[n]), int(positions.length[n])
        history = positions.tokens[positions.slot[n], :length].long()
        history[(history < 0) | (history >= z.shape[1])] = 0  # behind the drafts of a padded window
        counts = torch.bincount(history[int(penalties.prompt_len[w]) :], minlength=z.shape[1])
        seen = torch.bincount(history, minlength=z.shape[1]) > 0
        repetition = penalties.repetition[w]
        repeated = torch.where(z[n] > 0, z[n] / repetition, z[n] * repetition)
        repeated -= penalties.frequency[w] * counts
        repeated -= penalties.presence[w] * (counts > 0)
        z[n] = torch.where(seen, repeated.clamp(max=SATURATED), z[n])


def _forbid(z: Tensor, positions: Positions, forbidden: Forbidden) -> None:
    for n in forbidden.which.tolist():
        w, length = int(positions.window[n]), int(positions.length[n])
        history = positions.tokens[positions.slot[n], int(forbidden.first[w]) : length].tolist()
        for i in range(int(forbidden.cu[w]), int(forbidden.cu[w + 1])):
            *prefix, last = forbidden.ids[forbidden.cu_ids[i] : forbidden.cu_ids[i + 1]].tolist()
            at_end = len(prefix) <= len(history) and history[len(history) - len(prefix) :] == prefix
            if at_end and length < int(forbidden.until[i]):
                z[n, last] = -torch.inf


def _mask(z: Tensor, masks: Masks) -> None:
    bits = masks.words.unsqueeze(2) >> torch.arange(32, device=z.device, dtype=torch.int32) & 1
    barred = bits.flatten(1)[:, : z.shape[1]] == 0
    rows = masks.which.long()
    z[rows] = z[rows].masked_fill(barred, -torch.inf)
