"""Step as the core sees it: the plan it made and the outcome it applies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from surestep_common.invariants import BoolArray, IntArray, PlanRows, ResultRows

from surestep_scheduler.speculation.draft_length import Took

from .sequence import Tenancy, TokenLogprobs


class Freed(NamedTuple):
    """A tenancy that ends."""

    slot: int
    slot_epoch: int


class Extend(NamedTuple):
    """Blocks appended to a block table of a slot."""

    slot: int
    group: int  # KV group
    blocks: list[int]


class GiveBack(NamedTuple):
    """Leading entries of a block table of a slot that no later position sees."""

    slot: int
    group: int
    num_blocks: int


class PlannedSnapshots(NamedTuple):
    """Snapshots of recurrent state that a plan asks for; parallel columns [S]."""

    row: IntArray  # of the plan, for its slot
    length: IntArray  # tokens
    id: IntArray


NO_SNAPSHOTS = PlannedSnapshots(*np.zeros((3, 0), dtype=np.int64))


class Kept(NamedTuple):
    """Blocks and snapshots that outlive the workers of an epoch."""

    epoch: int  # the last one that ran on them
    blocks: BoolArray  # [num_blocks] by id
    drafted: BoolArray  # [num_blocks] the drafter's rows are kept as well
    snapshots: Mapping[int, int]  # tokens in each, by id


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a step. `tenancies`, `rows` and `width` are parallel [R]."""

    epoch: int
    step: int
    freed: list[Freed]
    admissions: list[Tenancy]
    give_backs: list[GiveBack]
    extends: list[Extend]
    tenancies: npt.NDArray[np.object_]
    rows: PlanRows
    width: IntArray  # tokens each row schedules: num_tokens, or max_drafts + 1
    snapshot_requests: PlannedSnapshots
    drafter_faults: int  # of this epoch, known when it was made
    capture: int = 0  # kind of step that the workers capture before it; 0: none
    planner: int = 0  # of the first plan of an epoch: see KeptCaches in worker.proto
    kept: Kept | None = None  # with which the epoch begins

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
    """Times of a rank in a step, in microseconds; see Timings in worker.proto."""

    queue_us: int
    prepare_us: int
    draft_us: int
    forward_us: int
    sample_us: int
    gap_us: int

    @property
    def took(self) -> Took:
        """Cost of the step, without its waits."""
        step_us = self.prepare_us - self.draft_us + self.forward_us + self.sample_us
        return Took(step_us, self.draft_us)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a step on the ranks. `slot`, `slot_epoch` and `rows` are parallel [R]."""

    epoch: int
    step: int
    digests: list[int]  # one per rank
    times: list[RankTimes]  # one per rank
    slot: IntArray
    slot_epoch: IntArray
    rows: ResultRows
    token_ids: npt.NDArray[np.uint32]  # CSR by n_emitted
    snapshot_ids_taken: IntArray  # [S]
    drafter_faults: int  # of this epoch
    missed_kind: int  # of step, that the workers ask to have captured; 0: none
    drafter_skipped: bool  # no drafts and no catch-up in this step
    draft_non_finite_rows: list[int]
    logprobs: dict[int, TokenLogprobs]  # by row
    prompt_logprobs: dict[int, TokenLogprobs]  # by row
    pooled: dict[int, bytes]  # vectors by row
    grammar_faults: dict[int, str]  # why a row failed, where its grammar is at fault; by row
