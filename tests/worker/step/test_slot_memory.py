"""The slots on a device follow those of the host, difference by difference."""

from __future__ import annotations

import numpy as np
import torch
from surestep_kernels.write_runs import write_runs_reference
from surestep_proto import worker_pb2 as pb
from surestep_worker.step.batch import Extras
from surestep_worker.step.slots import SlotMemory, Slots, extend_groups
from surestep_worker.step.transfer import upload

WINDOWS = (0, 7, 2)
BLOCK = 4


def apply(slots: Slots, memory: SlotMemory, plan: pb.StepPlan) -> None:
    """As the runner does it."""
    for admission in plan.admissions:
        slots.admit(admission)
    for slot, group, count in zip(
        plan.release_slots, plan.release_groups, plan.release_counts, strict=True
    ):
        slots.give_back(slot, group, count)
    blocks = iter(plan.block_ids)
    for slot, group, count in zip(
        plan.extend_slots, extend_groups(plan), plan.extend_counts, strict=True
    ):
        slots.extend(slot, np.array([next(blocks) for _ in range(count)]), group)
    differences = memory.differences(plan)
    assert differences is not None
    sent = upload(Extras(differences=differences), torch.device("cpu")).differences
    assert sent is not None
    write_runs_reference(memory.words, sent)


def test_tables_of_all_groups_follow() -> None:
    slots = Slots(3, max_model_len=40, max_draft_tokens=1, block_size=BLOCK, windows=WINDOWS)
    memory, ids = SlotMemory(slots, torch.device("cpu")), list(range(30))
    plan = pb.StepPlan(
        release_slots=[2, 2],
        release_groups=[1, 2],
        release_counts=[1, 2],
        extend_slots=[2, 2, 2],
        extend_groups=[0, 1, 2],
        extend_counts=[3, 2, 1],
        block_ids=[1, 2, 3, 4, 5, 6],
    )
    plan.admissions.add(
        slot=2, slot_epoch=1, token_ids=ids, prompt_len=30, max_len=40, num_cached=11
    )
    apply(slots, memory, plan)
    tables = memory.state.block_tables[:, 2, :4].tolist()
    assert tables == [[1, 2, 3, 0], [0, 4, 5, 0], [0, 0, 6, 0]]
    slots.committed[2] = 20
    plan = pb.StepPlan(
        release_slots=[2, 2],
        release_groups=[2, 1],
        release_counts=[2, 2],
        extend_slots=[2, 2],
        extend_groups=[1, 0],
        extend_counts=[3, 2],
        block_ids=[7, 8, 9, 10, 11],
    )
    apply(slots, memory, plan)
    state = memory.state
    assert torch.equal(state.block_tables[:, :3], torch.from_numpy(slots.block_tables))
    assert state.block_tables[:, 2, :6].tolist() == [
        [1, 2, 3, 10, 11, 0],
        [0, 0, 0, 7, 8, 9],
        [0, 0, 0, 0, 0, 0],
    ]
    assert not state.block_tables[:, [0, 1, 3]].any()
    assert state.tokens[2, :30].tolist() == ids
