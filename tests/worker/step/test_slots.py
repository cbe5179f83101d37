"""Slots: tenancies, the double entry log, and tokens behind the committed ones."""

from __future__ import annotations

import numpy as np
import pytest
from surestep_common.errors import InternalError
from surestep_common.invariants import NULL_BLOCK, IntArray, LedgerError
from surestep_proto import worker_pb2 as pb
from surestep_worker.step.slots import Slots


def I(*values: int) -> IntArray:  # noqa: E743
    return np.array(values, dtype=np.int64)


def admission(slot: int, tenancy: int, ids: list[int], num_cached: int = 0) -> pb.Admission:
    return pb.Admission(
        slot=slot,
        slot_epoch=tenancy,
        token_ids=ids,
        prompt_len=len(ids),
        max_len=16,
        num_cached=num_cached,
    )


@pytest.fixture
def slots() -> Slots:
    return Slots(num_slots=3, max_model_len=16, max_draft_tokens=2, block_size=4)


def test_a_tenancy_starts_from_what_is_known_and_cached(slots: Slots) -> None:
    slots.admit(admission(1, 5, [7, 8, 9, 6, 5], num_cached=4))
    assert (slots.known[1], slots.committed[1], slots.tenancy[1]) == (5, 4, 5)
    assert slots.tokens[1, :5].tolist() == [7, 8, 9, 6, 5]


@pytest.mark.parametrize("tenancy", [4, 5])
def test_a_tenancy_is_never_repeated(slots: Slots, tenancy: int) -> None:
    slots.admit(admission(1, 5, [7]))
    slots.free(1, 5)
    with pytest.raises(InternalError, match="cannot start"):
        slots.admit(admission(1, tenancy, [7]))


def test_an_occupied_slot_is_not_given_away(slots: Slots) -> None:
    slots.admit(admission(1, 5, [7]))
    with pytest.raises(InternalError, match="cannot start"):
        slots.admit(admission(1, 6, [7]))


def test_only_the_tenant_can_be_freed(slots: Slots) -> None:
    slots.admit(admission(0, 2, [7]))
    with pytest.raises(InternalError, match="does not hold"):
        slots.free(0, 1)
    slots.free(0, 2)
    with pytest.raises(InternalError, match="does not hold"):
        slots.free(0, 2)


def test_tokens_that_do_not_fit_are_refused(slots: Slots) -> None:
    with pytest.raises(InternalError, match="do not fit"):
        slots.admit(admission(0, 1, list(range(17))))
    with pytest.raises(InternalError, match="do not fit"):
        slots.admit(admission(0, 1, [1, 2], num_cached=2))


def test_freeing_forgets_blocks_and_log(slots: Slots) -> None:
    slots.admit(admission(2, 1, [7]))
    slots.extend(2, I(3, 4))
    slots.commit(1, I(2), folded=I(0), consumed=I(1), accepted=I(1), emitted=I(1))
    slots.free(2, 1)
    assert (slots.block_tables[:, 2] == NULL_BLOCK).all()
    assert not slots.num_blocks[:, 2].any()
    slots.admit(admission(2, 2, [7]))
    assert slots.accepted_at(I(2), I(1)).tolist() == [-1]


def test_the_log_answers_for_recent_steps_of_this_tenancy_only(slots: Slots) -> None:
    slots.admit(admission(0, 1, [7]))
    slots.admit(admission(1, 1, [7]))
    for step, accepted in ((1, 0), (2, 2), (3, 1)):
        slots.commit(step, I(0), folded=I(0), consumed=I(1), accepted=I(accepted), emitted=I(1))
    slots.commit(3, I(1), folded=I(0), consumed=I(1), accepted=I(0), emitted=I(1))
    assert slots.accepted_at(I(0, 0, 0), I(1, 2, 3)).tolist() == [0, 2, 1]
    assert slots.accepted_at(I(1, 1), I(3, 2)).tolist() == [0, -1]
    assert slots.accepted_at(I(0), I(0)).tolist() == [0]  # nothing applied yet


def test_the_log_keeps_the_step_before_however_long_ago_it_was(slots: Slots) -> None:
    """A slot that had no row for some steps is planned on with the last one it had in mind."""
    for since in range(1, 40):
        slots.admit(admission(0, since, [7]))
        for step, accepted in ((5, 2), (5 + since, 1)):
            slots.commit(step, I(0), folded=I(0), consumed=I(1), accepted=I(accepted), emitted=I(1))
        assert slots.accepted_at(I(0, 0), I(5, 5 + since)).tolist() == [2, 1]
        slots.free(0, since)


def test_an_epoch_starts_empty(slots: Slots) -> None:
    slots.admit(admission(0, 9, [7]))
    slots.reset()
    assert not slots.occupied.any()
    slots.admit(admission(0, 1, [7]))


@pytest.fixture
def grouped() -> Slots:
    return Slots(3, max_model_len=40, max_draft_tokens=2, block_size=4, windows=(0, 6))


def test_tables_of_groups_grow_and_shrink_on_their_own(grouped: Slots) -> None:
    grouped.admit(admission(1, 1, list(range(12))))
    grouped.extend(1, I(3, 4, 5), group=0)
    grouped.extend(1, I(6, 7), group=1)
    assert grouped.capacity(I(1)).tolist() == [8]
    grouped.commit(1, I(1), folded=I(0), consumed=I(9), accepted=I(0), emitted=I(0))
    grouped.give_back(1, group=1, count=1)  # the token at 9 sees 4 to 9
    grouped.extend(1, I(8), group=1)
    assert grouped.block_tables[:, 1, :4].tolist() == [[3, 4, 5, 0], [0, 7, 8, 0]]
    assert grouped.capacity(I(1)).tolist() == [12]
    with pytest.raises(LedgerError, match="1 is the first that is seen"):
        grouped.give_back(1, group=1, count=1)
    with pytest.raises(LedgerError, match="KV group 0 are given back"):
        grouped.give_back(1, group=0, count=1)
    grouped.free(1, 1)
    assert not grouped.block_tables.any()
    assert not grouped.first_block.any()


def test_a_table_begins_behind_what_a_cached_prefix_hides(grouped: Slots) -> None:
    ids = list(range(14))
    grouped.admit(pb.Admission(slot=0, slot_epoch=1, token_ids=ids, max_len=16, num_cached=12))
    grouped.extend(0, I(1, 2, 3, 4), group=0)
    grouped.give_back(0, group=1, count=1)  # the token at 12 sees 7 to 12
    grouped.extend(0, I(5, 6, 7), group=1)
    assert grouped.block_tables[:, 0, :5].tolist() == [[1, 2, 3, 4, 0], [0, 5, 6, 7, 0]]
    assert grouped.capacity(I(0)).tolist() == [16]


def test_a_slot_is_guided_while_its_tenant_has_a_grammar(slots: Slots) -> None:
    guided = admission(1, 5, [7])
    guided.sampling.grammar.source = "{}"
    slots.admit(guided)
    slots.admit(admission(2, 1, [7]))
    assert slots.guided.tolist() == [False, True, False, False]  # and rows of padding never
    slots.free(1, 5)
    assert not slots.guided.any()
    guided.slot_epoch = 6
    slots.admit(guided)
    slots.reset()
    assert not slots.guided.any()
