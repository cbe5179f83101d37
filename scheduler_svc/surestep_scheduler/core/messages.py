"""One step as the core sees it: the plan it made and the outcome it applies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from surestep_common.invariants import BoolArray, IntArray

from .sequence import Logprobs, Tenancy


class Freed(NamedTuple):
    """A tenancy that ends."""

    slot: int
    slot_epoch: int


class Extend(NamedTuple):
    """Blocks appended to the block table of a slot."""

    slot: int
    blocks: list[int]


class SnapshotRequests(NamedTuple):
    """Snapshots of recurrent state that a plan asks for; parallel columns [S]."""

    row: IntArray  # of the plan, for its slot
    length: IntArray  # tokens
    id: IntArray


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Row columns are parallel [R]; see StepPlan in engine.proto for their meaning."""

    epoch: int
    step: int
    freed: list[Freed]
    admissions: list[Tenancy]
    extends: list[Extend]
    rows: npt.NDArray[np.object_]  # tenancies
    slot: IntArray
    slot_epoch: IntArray
    mode: IntArray
    num_tokens: IntArray
    len_lo: IntArray
    len_hi: IntArray
    k_cap: IntArray
    accepted_step: IntArray
    accepted: IntArray
    depends_on_step: IntArray
    catch_up: IntArray
    width: IntArray  # tokens each row schedules: num_tokens, or k_cap + 1
    snapshot_requests: SnapshotRequests
    drafter_faults: int  # of this epoch, known when it was made

    @property
    def num_step_tokens(self) -> int:
        """Input rows of the step, drafts included."""
        return int(self.width.sum())

    @property
    def snapshot_ids(self) -> tuple[list[int], list[int]]:
        """Ids that the plan names: to be taken, and to be restored."""
        restored = [t.snapshot_id for t in self.admissions if t.snapshot_id]
        return self.snapshot_requests.id.tolist(), restored


class RankTimes(NamedTuple):
    """What a rank spent on a step, in microseconds; see Timings in engine.proto."""

    queue_us: int
    prepare_us: int
    draft_us: int
    forward_us: int
    sample_us: int
    gap_us: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the ranks report for one step. Row columns are parallel [R], in the plan's order."""

    epoch: int
    step: int
    digests: list[int]  # one per rank
    times: list[RankTimes]  # one per rank
    slot: IntArray
    slot_epoch: IntArray
    ok: BoolArray
    non_finite: BoolArray  # not ok because of the model's logits, not of the request's parameters
    len_before: IntArray
    n_drafts: IntArray
    n_accepted: IntArray
    n_emitted: IntArray
    token_ids: npt.NDArray[np.uint32]  # CSR by n_emitted
    draft_upto: IntArray
    snapshot_ids_taken: IntArray  # [S]
    drafter_faults: int  # of this epoch
    drafter_skipped: bool  # no drafts and no catch-up in this step
    draft_non_finite_rows: list[int]
    logprobs: dict[int, Logprobs]  # by row
    prompt_logprobs: dict[int, Logprobs]  # by row
    pooled: dict[int, bytes]  # vectors by row

    @property
    def n_drafts_emitted(self) -> IntArray:
        """[R] accepted drafts; those behind a stop id were never emitted."""
        return np.minimum(self.n_accepted, self.n_emitted)
