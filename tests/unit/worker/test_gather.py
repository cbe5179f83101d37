"""gather() against a loop that does what the protocol says, row by row."""

from __future__ import annotations

import numpy as np
import torch
from surestep_proto import engine_pb2 as pb
from surestep_worker.gather import gather
from surestep_worker.plan import Rows
from surestep_worker.slots import Slots

BLOCK = 4
SEED = 5


def random_case(rng: np.random.Generator) -> tuple[Rows, np.ndarray, Slots]:
    """Slots in random states with one row each, in random order and of random modes."""
    slots = Slots(num_slots=6, max_model_len=40, max_draft_tokens=3, block_size=BLOCK)
    columns: list[tuple[int, int, int, int]] = []
    free = list(rng.permutation(np.arange(1, 100)))
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
        slots.extend(slot, np.array([free.pop() for _ in range(-(-end // BLOCK))]))
        columns.append((slot, mode, num_tokens, n_drafts))
    slots_of, modes, lengths, drafts = np.array(columns).T
    zeros = np.zeros_like(slots_of)
    rows = Rows(slots_of, zeros, modes, lengths, zeros, zeros, drafts, zeros, zeros, zeros, zeros)
    return rows, drafts, slots


def test_gather_equals_the_row_by_row_definition() -> None:
    rng = np.random.default_rng(SEED)
    for _ in range(200):
        rows, n_drafts, slots = random_case(rng)
        gathered = gather(
            rows, n_drafts, slots, np.zeros(6, dtype=np.bool_), None, torch.device("cpu")
        )
        tokens, positions, kv_slots, hidden_index, lengths = (list[int]() for _ in range(5))
        for row, slot in enumerate(rows.slot):
            start = int(slots.committed[slot])
            prefill = rows.mode[row] in (pb.PREFILL, pb.PREFILL_LAST)
            width = int(rows.num_tokens[row]) if prefill else 1 + int(n_drafts[row])
            for position in range(start, start + width):
                block = slots.block_tables[slot, position // BLOCK]
                assert block != 0
                sampled = not prefill or (
                    rows.mode[row] == pb.PREFILL_LAST and position == start + width - 1
                )
                if sampled:
                    hidden_index.append(len(tokens))
                    lengths.append(position + 1)
                tokens.append(int(slots.tokens[slot, position]))
                positions.append(position)
                kv_slots.append(int(block) * BLOCK + position % BLOCK)
        batch = gathered.batch
        assert batch.token_ids.tolist() == tokens
        assert batch.positions.tolist() == positions
        assert batch.kv_slots.tolist() == kv_slots
        assert batch.hidden_index.tolist() == hidden_index
        assert gathered.windows.length.tolist() == lengths
        assert batch.rows.start.tolist() == slots.committed[rows.slot].tolist()
        assert gathered.windows.cu[-1] == len(lengths)


def test_a_step_without_rows_is_an_empty_batch() -> None:
    none = np.zeros(0, dtype=np.int64)
    slots = Slots(num_slots=2, max_model_len=8, max_draft_tokens=0, block_size=BLOCK)
    gathered = gather(
        Rows(*[none] * 11), none, slots, np.zeros(2, dtype=np.bool_), None, torch.device("cpu")
    )
    assert gathered.batch.token_ids.numel() == 0
    assert gathered.windows.cu.tolist() == [0]
