"""Steps in which nobody is, run before the first real one so that no kernel is compiled later.

Which kernels a step runs, and how they are compiled, follows from its longest row, from its drafts
and from what its requests ask of sampling. Rows of the NULL slot are as good for that as any.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from surestep_proto import engine_pb2 as pb

from surestep_worker.plan import Rows

_GREEDY = pb.SamplingParams(top_p=1, repetition_penalty=1)
_DRAWN = pb.SamplingParams(top_p=1, repetition_penalty=1, temperature=1)
_EVERYTHING = pb.SamplingParams(
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
    bad_words=[pb.TokenSequence(token_ids=[0, 1])],
)


def warm_up_steps(
    null_slot: int, max_tokens: int, max_drafts: int
) -> Iterator[tuple[Rows, pb.SamplingParams]]:
    """Rows, and what they ask of sampling: prompts of all sizes, windows, and all parameters."""
    for params in (_GREEDY, _DRAWN, _EVERYTHING):
        for k_cap in range(max_drafts + 1):
            yield _row(null_slot, pb.VERIFY, 0, k_cap), params
    for power in range(max_tokens.bit_length()):
        yield _row(null_slot, pb.PREFILL_LAST, min(1 << power, max_tokens), 0), _GREEDY
    yield _row(null_slot, pb.PREFILL_LAST, max_tokens, 0), _GREEDY


def _row(slot: int, mode: pb.DecodeMode, num_tokens: int, k_cap: int) -> Rows:
    """One row alone; a drafter with state may catch up, if there were anything, in a window."""
    told = {"slot": slot, "mode": mode, "num_tokens": num_tokens, "k_cap": k_cap}
    told["catch_up"] = 1 + k_cap if mode == pb.VERIFY else num_tokens
    nothing = Rows.none()
    return Rows(**{name: np.array([told.get(name, 0)]) for name, _ in nothing.columns()})
