"""Fills in the StepResult that reports a step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from surestep_common.invariants import FloatArray
from surestep_proto import worker_pb2 as pb

from surestep_worker.ledger.plan import IntArray, Rows
from surestep_worker.ledger.positions import PooledTokens


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What each row of a plan did. All arrays are [R]."""

    len_before: IntArray
    n_drafts: IntArray
    status: IntArray
    n_accepted: IntArray
    n_emitted: IntArray


def digest(
    outcome: StepOutcome, ids: IntArray, committed: IntArray, hidden_fingerprint: int
) -> int:
    """Hash tokens, counts, slot lengths after the step and final hidden states into 64 bits."""
    hasher = hashlib.blake2b(digest_size=8)
    for array in (outcome.n_drafts, outcome.status, outcome.n_accepted, committed):
        hasher.update(array.tobytes())
    hasher.update(ids.tobytes())
    hasher.update(hidden_fingerprint.to_bytes(8, "little", signed=True))
    return int.from_bytes(hasher.digest(), "little")


def fill_rows(result: pb.StepResult, rows: Rows, outcome: StepOutcome, ids: IntArray) -> None:
    """Fill the row columns, in the plan's order, and the emitted ids."""
    result.slot.extend(rows.slot.tolist())
    result.slot_epoch.extend(rows.slot_epoch.tolist())
    result.status.extend(outcome.status.tolist())
    result.len_before.extend(outcome.len_before.tolist())
    result.n_drafts.extend(outcome.n_drafts.tolist())
    result.n_accepted.extend(outcome.n_accepted.tolist())
    result.n_emitted.extend(outcome.n_emitted.tolist())
    result.token_ids.extend(ids.tolist())


def pooled_vectors(
    pooled: PooledTokens, means: torch.Tensor, label_logits: torch.Tensor
) -> list[FloatArray]:
    """Return the K vectors: means f32[K, H], or the label logits f32[K, L] of rows with labels."""
    if not pooled.num_labels.any():
        return list(means.numpy())
    return [
        logits[:count] if count else mean
        for mean, logits, count in zip(
            means.numpy(), label_logits.numpy(), pooled.num_labels.tolist(), strict=True
        )
    ]


def mark_non_finite_vectors(
    outcome: StepOutcome, pooled: PooledTokens, vectors: Sequence[FloatArray]
) -> None:
    """Set the status of rows whose vectors are not finite."""
    for row, vector in zip(pooled.row, vectors, strict=True):
        if not np.isfinite(vector).all():
            outcome.status[row] = pb.NON_FINITE


def fill_vectors(
    result: pb.StepResult, outcome: StepOutcome, pooled: PooledTokens, vectors: Sequence[FloatArray]
) -> None:
    """Fill in the vectors of the rows that have not failed."""
    for row, vector in zip(pooled.row.tolist(), vectors, strict=True):
        if outcome.status[row] == pb.OK:
            result.pooled_rows.append(row)
            result.pooled.append(vector.astype("<f4").tobytes())


def emitted_ids(tokens: torch.Tensor, n_emitted: IntArray) -> IntArray:
    """Return the emitted ids, grouped by row: the first n_emitted [R] of tokens [R, K+1]."""
    ids: IntArray = tokens.numpy()[np.arange(tokens.shape[1]) < n_emitted[:, None]]
    return ids
