"""Steps of padding alone, run before the first real one so that no kernel is compiled later.

Which kernels a step runs, and how they are compiled, depends on its longest row, its drafts and its
sampling parameters. Rows of the NULL slot serve for that as well as any.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb

from surestep_worker.ledger.plan import Rows
from surestep_worker.ledger.slots import Slots

_GREEDY = sampling_pb2.SamplingParams(top_p=1, repetition_penalty=1)
_DRAWN = sampling_pb2.SamplingParams(top_p=1, repetition_penalty=1, temperature=1)
EVERYTHING = sampling_pb2.SamplingParams(  # that truncates or shapes what is drawn
    temperature=1,
    top_p=0.9,
    top_k=3,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    stop_token_ids=[0],
    min_tokens=1,
    bad_words=[sampling_pb2.TokenSequence(token_ids=[0, 1])],
)


def warm_up_steps(
    slots: Slots, max_tokens: int, max_drafts: int, *, has_head: bool
) -> Iterator[tuple[Rows, sampling_pb2.SamplingParams]]:
    """Yield rows and their sampling parameters: windows of all parameters, prompts of all sizes.

    The largest steps have as many rows as there are slots, and max_tokens tokens. A model without
    an output head gets prompts alone, which are pooled.
    """
    null_slot, longest = slots.num_slots, min(max_tokens, slots.tokens.shape[1])
    for params in (_GREEDY, _DRAWN, EVERYTHING) if has_head else ():
        for num_drafts in range(max_drafts + 1):
            yield _rows(null_slot, 1, pb.VERIFY, max_drafts=num_drafts), params
    if has_head:
        yield _rows(null_slot, slots.num_slots, pb.VERIFY, max_drafts=max_drafts), _GREEDY
    last = pb.PREFILL_LAST if has_head else pb.POOL
    for power in range(longest.bit_length()):
        yield _rows(null_slot, 1, last, num_tokens=1 << power), _GREEDY
    prompts = min(slots.num_slots, -(-max_tokens // longest))
    yield _rows(null_slot, prompts, last, num_tokens=longest), _GREEDY


def _rows(
    slot: int, count: int, mode: pb.DecodeMode, *, max_drafts: int = 0, num_tokens: int = 0
) -> Rows:
    """Return rows whose drafter catches up with as many positions as they have tokens."""
    columns = {"slot": slot, "mode": mode, "num_tokens": num_tokens, "max_drafts": max_drafts}
    columns["max_proposed"] = max_drafts
    columns["catch_up"] = 1 + max_drafts if mode == pb.VERIFY else num_tokens
    names = (name for name, _ in Rows.none().columns())
    return Rows(**{name: np.full(count, columns.get(name, 0)) for name in names})
