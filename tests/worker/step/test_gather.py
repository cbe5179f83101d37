"""What a step gathers, against a loop that does what the protocol says, row by row."""

from __future__ import annotations

import numpy as np
import torch
from support.kernels.step_sampling import OPS
from surestep_kernels.gather_step import StepInputs
from surestep_kernels.slot_state import DraftIds
from surestep_proto import worker_pb2 as pb
from surestep_worker.step.batch import Geometry
from surestep_worker.step.plan import NO_SNAPSHOTS, Rows
from surestep_worker.step.slots import SlotMemory, Slots
from surestep_worker.step.transfer import upload

BLOCK = 4
SEED = 5


def random_case(rng: np.random.Generator) -> tuple[Rows, np.ndarray, Slots]:
    """Slots in random states with one row each, in random order and of random modes."""
    sizes = {"num_slots": 6, "max_model_len": 40, "max_draft_tokens": 3, "block_size": BLOCK}
    slots = Slots(**sizes, windows=(0, 7))
    columns: list[tuple[int, int, int, int]] = []
    free = list(rng.permutation(np.arange(1, 200)))
    for slot in rng.permutation(6):
        known = int(rng.integers(1, 30))
        slots.tokens[slot] = torch.from_numpy(rng.integers(0, 99, slots.tokens.shape[1]))
        mode = int(rng.choice([pb.PREFILL, pb.PREFILL_LAST, pb.DECODE, pb.VERIFY]))
        num_tokens = n_drafts = 0
        if mode == pb.PREFILL_LAST or (mode == pb.PREFILL and known == 1):
            mode = pb.PREFILL_LAST
            num_tokens = int(rng.integers(1, known + 1))
            committed = known - num_tokens
        elif mode == pb.PREFILL:
            committed = int(rng.integers(0, known - 1))
            num_tokens = int(rng.integers(1, known - committed))
        else:
            committed = known - 1
            n_drafts = int(rng.integers(0, 4)) if mode == pb.VERIFY else 0
        slots.known[slot], slots.committed[slot] = known, committed
        end = committed + max(num_tokens, 1 + n_drafts)
        for group in range(2):
            slots.extend(slot, np.array([free.pop() for _ in range(-(-end // BLOCK))]), group)
        columns.append((slot, mode, num_tokens, n_drafts))
    slots_of, modes, lengths, drafts = np.array(columns).T
    zeros = np.zeros_like(slots_of)
    rows = Rows(slots_of, zeros, modes, lengths, zeros, zeros, drafts, drafts, *[zeros] * 6)
    return rows, drafts, slots


def gathered(rows: Rows, slots: Slots) -> tuple[Geometry, StepInputs]:
    """With as many drafts as there may be, which stand in the slots already."""
    wants, cpu = np.zeros(slots.num_slots + 1, dtype=np.bool_), torch.device("cpu")
    geometry, state = Geometry.of(rows, slots, wants, NO_SNAPSHOTS), SlotMemory(slots, cpu).state
    for name, column in state._asdict().items():
        lines = (
            column[:, : slots.num_slots] if name == "block_tables" else column[: slots.num_slots]
        )
        lines[:] = torch.as_tensor(getattr(slots, name))
    known, caps = slots.known[rows.slot], rows.max_drafts
    ids = np.zeros((len(rows), 3), dtype=np.int64)
    for row, slot in enumerate(rows.slot):
        ids[row, : caps[row]] = slots.ids_at(slot, known[row] + np.arange(caps[row]))
    drafts = DraftIds(torch.from_numpy(ids).int(), torch.from_numpy(caps).int())
    error = torch.zeros(1, dtype=torch.int32)
    inputs = OPS.gather_step(upload(geometry.rows, cpu), drafts, state, error, BLOCK, 200)
    assert not error.any()
    return geometry, inputs


def test_gather_equals_the_row_by_row_definition() -> None:
    rng = np.random.default_rng(SEED)
    for _ in range(200):
        rows, n_drafts, slots = random_case(rng)
        geometry, inputs = gathered(rows, slots)
        tokens, positions, hidden_index, lengths = (list[int]() for _ in range(4))
        kv_slots = list[int](), list[int]()
        for row, slot in enumerate(rows.slot):
            start = int(slots.committed[slot])
            prefill = rows.mode[row] in (pb.PREFILL, pb.PREFILL_LAST)
            width = int(rows.num_tokens[row]) if prefill else 1 + int(n_drafts[row])
            for position in range(start, start + width):
                blocks = slots.block_tables[:, slot, position // BLOCK].tolist()
                assert all(blocks)
                sampled = not prefill or (
                    rows.mode[row] == pb.PREFILL_LAST and position == start + width - 1
                )
                if sampled:
                    hidden_index.append(len(tokens))
                    lengths.append(position + 1)
                tokens.append(int(slots.tokens[slot, position]))
                positions.append(position)
                for group, block in enumerate(blocks):
                    kv_slots[group].append(block * BLOCK + position % BLOCK)
        assert inputs.token_ids.tolist() == tokens
        assert inputs.positions.tolist() == positions
        assert inputs.kv_slots.tolist() == list(kv_slots)
        assert geometry.hidden_index.tolist() == hidden_index
        assert inputs.lengths.tolist() == lengths
        assert inputs.start.tolist() == slots.committed[rows.slot].tolist()
        assert geometry.rows.cu_windows[-1] == len(lengths)


def test_a_step_without_rows_is_an_empty_batch() -> None:
    slots = Slots(num_slots=2, max_model_len=8, max_draft_tokens=0, block_size=BLOCK)
    geometry, inputs = gathered(Rows.none(), slots)
    assert inputs.token_ids.numel() == 0
    assert geometry.rows.cu_windows.tolist() == [0]
