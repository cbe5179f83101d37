"""Kinds of models that differ in what the scheduler has to keep of a request."""

from __future__ import annotations

from dataclasses import replace

from support.fakes.model import FakeModel

MODEL = FakeModel(
    vocab_size=13,
    num_slots=4,
    num_blocks=16,
    block_size=3,
    max_model_len=40,
    max_step_tokens=24,
    max_draft_tokens=3,
)

KINDS = {
    "stateless": MODEL,
    "drafter": replace(MODEL, drafter_has_state=True),
    "lookups": replace(MODEL, drafter_has_state=True, drafter_looks_up=True),
    "recurrent": replace(MODEL, recurrent=True, num_snapshots=7),
    "both": replace(MODEL, drafter_has_state=True, recurrent=True, num_snapshots=3),
    "in chunks": replace(MODEL, recurrent=True, num_snapshots=5, prompt_chunk=4),
    "no snapshots": replace(MODEL, drafter_has_state=True, recurrent=True),
    "window": replace(MODEL, kv_windows=(0, 5), num_blocks=24),
    "windows alone": replace(MODEL, kv_windows=(1, 4, 7)),
    "window and states": replace(
        MODEL,
        kv_windows=(0, 8),
        drafter_has_state=True,
        recurrent=True,
        num_snapshots=3,
        num_blocks=24,
    ),
}
