"""A rank refuses a plan that points outside of what it has, before it does any of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from surestep_common.errors import InvalidRequest
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb
from surestep_worker.step.plan import PlanBounds

BOUNDS = PlanBounds(
    num_slots=4,
    max_tokens=32,
    num_blocks=10,
    num_groups=1,
    max_blocks_per_slot=4,
    vocab_size=50,
    num_snapshots=2,
    num_adapters=0,
    headless=False,
)


HELD = np.array([[0, 0, 3, 0]])


def plan() -> pb.StepPlan:
    sampling = sampling_pb2.SamplingParams(top_p=1, repetition_penalty=1)
    admission = pb.Admission(
        slot=1, slot_epoch=1, token_ids=[1, 2, 3], prompt_len=2, max_len=20, sampling=sampling
    )
    return pb.StepPlan(
        freed_slots=[2],
        freed_slot_epochs=[1],
        admissions=[admission],
        extend_slots=[1, 2],
        extend_counts=[2, 4],
        block_ids=[1, 2, 3, 4, 5, 9],
    )


def pooled(pooling: int = sampling_pb2.MEAN, **changes: Any) -> pb.StepPlan:
    """The same plan, but of the prompt a vector is wanted."""
    wanted = plan()
    wanted.admissions[0].ClearField("sampling")
    wanted.admissions[0].MergeFrom(pb.Admission(pooling=pooling, **changes))  # type: ignore[arg-type]
    return wanted


def test_a_prompt_to_be_pooled_has_no_sampling() -> None:
    for bounds in (BOUNDS, dataclasses.replace(BOUNDS, headless=True)):
        bounds.check(pooled(), HELD)
        bounds.check(pooled(sampling_pb2.LAST_TOKEN, num_cached=1), HELD)
    judged = pooled(sampling_pb2.LABEL_LOGITS, num_cached=1, label_ids=[1])
    BOUNDS.check(judged, HELD)
    for wrong, column in (
        (pooled(sampling=sampling_pb2.SamplingParams(top_p=1)), "sampling"),
        (pooled(num_cached=1), "num_cached"),
        (pooled(4), "pooling"),
        (pooled(label_ids=[1]), "label_ids"),
        (pooled(sampling_pb2.LABEL_LOGITS, label_ids=[BOUNDS.vocab_size]), "label_ids"),
    ):
        with pytest.raises(InvalidRequest, match=column):
            BOUNDS.check(wrong, HELD)
    for headed in (plan(), judged):
        with pytest.raises(InvalidRequest, match="the plan's pooling cannot be"):
            dataclasses.replace(BOUNDS, headless=True).check(headed, HELD)


def test_what_fits_is_accepted() -> None:
    BOUNDS.check(plan(), HELD)  # slot 2 is freed first


WRONG: dict[str, Callable[[pb.StepPlan], object]] = {
    "freed slot": lambda p: p.freed_slots.__setitem__(0, 4),
    "freed twice": lambda p: p.MergeFrom(pb.StepPlan(freed_slots=[2], freed_slot_epochs=[1])),
    "freed without tenancy": lambda p: p.freed_slots.append(3),
    "admitted slot": lambda p: setattr(p.admissions[0], "slot", 4),
    "no tokens": lambda p: p.admissions[0].ClearField("token_ids"),
    "token": lambda p: p.admissions[0].token_ids.append(50),
    "too many tokens": lambda p: p.admissions[0].token_ids.extend([1] * 30),
    "no prompt": lambda p: setattr(p.admissions[0], "prompt_len", 0),
    "prompt of unknown tokens": lambda p: setattr(p.admissions[0], "prompt_len", 4),
    "max_len": lambda p: setattr(p.admissions[0], "max_len", 33),
    "snapshot": lambda p: setattr(p.admissions[0], "snapshot_id", 3),
    "temperature": lambda p: setattr(p.admissions[0].sampling, "temperature", math.nan),
    "stop id": lambda p: p.admissions[0].sampling.stop_token_ids.append(50),
    "empty bad word": lambda p: p.admissions[0].sampling.bad_words.add(),
    "block": lambda p: p.block_ids.__setitem__(0, 10),
    "NULL block": lambda p: p.block_ids.__setitem__(0, 0),
    "fewer blocks than counted": lambda p: p.block_ids.pop(),
    "slot of blocks": lambda p: p.extend_slots.__setitem__(0, 4),
    "more blocks than a slot holds": lambda p: p.freed_slots.__setitem__(0, 3),
    "row": lambda p: p.slot.append(4),
    "slot of a snapshot": lambda p: p.snapshot_slots.append(4),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused(what: str) -> None:
    wrong = plan()
    WRONG[what](wrong)
    with pytest.raises(InvalidRequest):
        BOUNDS.check(wrong, HELD)


GROUPED = dataclasses.replace(BOUNDS, num_groups=2)
HELD_IN_GROUPS = np.array([[0, 0, 3, 0], [0, 0, 3, 0]])


def grouped_plan() -> pb.StepPlan:
    """Slot 1 is admitted with a cached prefix, slot 3 slides on."""
    changed = plan()
    changed.extend_groups.extend([0, 1])
    changed.MergeFrom(
        pb.StepPlan(release_slots=[1, 3], release_groups=[1, 1], release_counts=[2, 1])
    )
    return changed


def test_tables_of_groups_are_bounded_each() -> None:
    GROUPED.check(grouped_plan(), HELD_IN_GROUPS)
    full = grouped_plan()
    full.extend_slots[:] = [1, 1]  # two entries behind two that were never there, and four
    full.extend_groups[:] = [1, 0]
    GROUPED.check(full, HELD_IN_GROUPS)
    assert HELD_IN_GROUPS.tolist() == [[0, 0, 3, 0], [0, 0, 3, 0]]


WRONG_GROUPS: dict[str, Callable[[pb.StepPlan], object]] = {
    "group of blocks": lambda p: p.extend_groups.__setitem__(0, 2),
    "groups of some blocks": lambda p: p.extend_groups.pop(),
    "group given back": lambda p: p.release_groups.__setitem__(0, 2),
    "slot given back": lambda p: p.release_slots.__setitem__(0, 4),
    "given back without a count": lambda p: p.release_counts.pop(),
    "given back without a group": lambda p: p.release_groups.pop(),
    "given back twice": lambda p: p.release_slots.__setitem__(0, 3),
    "more than a table holds": lambda p: p.release_counts.__setitem__(1, 5),
    "one table twice": lambda p: (
        p.extend_slots.__setitem__(0, 2),
        p.extend_groups.__setitem__(0, 1),
    ),
    "too much behind a hidden prefix": lambda p: (
        p.extend_slots.__setitem__(0, 1),
        p.extend_groups.__setitem__(0, 1),
        p.release_counts.__setitem__(0, 3),
    ),
}


@pytest.mark.parametrize("what", WRONG_GROUPS)
def test_what_does_not_fit_a_group_is_refused(what: str) -> None:
    wrong = grouped_plan()
    WRONG_GROUPS[what](wrong)
    with pytest.raises(InvalidRequest):
        GROUPED.check(wrong, HELD_IN_GROUPS)
