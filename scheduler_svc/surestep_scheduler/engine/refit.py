"""Fit open requests to workers that came back with another model or other sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from surestep_common.errors import ModelChanged, RequestTooLarge, SurestepError

from surestep_scheduler.core.limits import Limits
from surestep_scheduler.core.sequence import Adapter, Sequence
from surestep_scheduler.core.state import SchedulerState


class Refused(NamedTuple):
    """An open request that cannot go on."""

    seq: Sequence
    error: SurestepError


def refit(
    state: SchedulerState,
    limits: Limits,
    *,
    same_model: bool,
    lost_adapters: Collection[Adapter] = (),
) -> list[Refused]:
    """Bring what waits in line with new `limits` between two epochs, and end what cannot go on.

    A request that has emitted nothing may go on with another model of the same vocabulary: it is
    as if it had come a moment later.
    """
    refused = list(_refused(state, limits, lost_adapters, same_model=same_model))
    for seq, _ in refused:
        state.end(seq, "error")
    for seq in state.open.values():
        seq.max_len = min(seq.max_len, limits.longest(seq.request.pooling))
        if _keys_depend_on(limits) != _keys_depend_on(state.limits):
            seq.shared_len = limits.shared_len(seq.prompt_len)
            seq.chain = seq.request.chain(limits)
    return refused


def _keys_depend_on(limits: Limits) -> tuple[int, int, bool]:
    return limits.block_size, limits.prompt_chunk, limits.drafter_has_state


def _refused(
    state: SchedulerState, limits: Limits, lost: Collection[Adapter], *, same_model: bool
) -> Iterator[Refused]:
    same_vocabulary = limits.vocab_size == state.limits.vocab_size
    for seq in state.open.values():
        begun, longest = len(seq.tokens) > seq.prompt_len, limits.longest(seq.request.pooling)
        cannot_write = limits.headless and seq.request.needs_head
        if not same_vocabulary or cannot_write or (begun and not same_model):
            yield Refused(seq, ModelChanged("the workers serve another model now"))
        elif seq.request.adapter in lost:
            yield Refused(seq, ModelChanged("the request's adapter is lost with the workers"))
        elif len(seq.tokens) >= longest:
            message = f"{len(seq.tokens)} tokens leave no room for output: the workers came back"
            yield Refused(seq, RequestTooLarge(f"{message} with room for {longest}"))
