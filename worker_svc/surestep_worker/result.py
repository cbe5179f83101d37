"""From what a step did to the StepResult that reports it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from surestep_proto import engine_pb2 as pb

from .gather import Gathered, PooledTokens
from .plan import IntArray, Rows
from .sampling import Verdict, emitted_logprobs, token_logprobs
from .sampling.wants import LogprobWants


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Counts per row of the plan. All arrays are [R]."""

    len_before: IntArray
    n_drafts: IntArray
    status: IntArray
    n_accepted: IntArray
    n_emitted: IntArray

    @classmethod
    def nothing_chosen(cls, len_before: IntArray, n_drafts: IntArray) -> StepOutcome:
        """An outcome in which every row is OK and emitted nothing."""
        zeros = np.zeros(len(len_before), dtype=np.int64)
        return cls(len_before, n_drafts, zeros + pb.OK, zeros.copy(), zeros.copy())


def digest(
    outcome: StepOutcome, verdict: Verdict, committed: IntArray, hidden_fingerprint: int
) -> int:
    """64 bits over tokens, counts, slot lengths after the step and final hidden states."""
    hasher = hashlib.blake2b(digest_size=8)
    for array in (outcome.n_drafts, outcome.status, outcome.n_accepted, committed):
        hasher.update(array.tobytes())
    hasher.update(_emitted_ids(verdict).tobytes())
    hasher.update(hidden_fingerprint.to_bytes(8, "little", signed=True))
    return int.from_bytes(hasher.digest(), "little")


def fill_rows(result: pb.StepResult, rows: Rows, outcome: StepOutcome, verdict: Verdict) -> None:
    """The row columns, in the plan's order."""
    result.slot.extend(rows.slot.tolist())
    result.slot_epoch.extend(rows.slot_epoch.tolist())
    result.status.extend(outcome.status.tolist())
    result.len_before.extend(outcome.len_before.tolist())
    result.n_drafts.extend(outcome.n_drafts.tolist())
    result.n_accepted.extend(outcome.n_accepted.tolist())
    result.n_emitted.extend(outcome.n_emitted.tolist())
    result.token_ids.extend(_emitted_ids(verdict).tolist())


def judge_vectors(outcome: StepOutcome, pooled: PooledTokens, vectors: torch.Tensor) -> None:
    """Rows whose vectors [K, H] are no numbers have failed."""
    if not len(vectors):
        return
    finite = vectors.isfinite().all(dim=1).numpy()
    outcome.status[pooled.row[~finite]] = pb.NON_FINITE


def fill_vectors(
    result: pb.StepResult, outcome: StepOutcome, pooled: PooledTokens, vectors: torch.Tensor
) -> None:
    """Vectors [K, H] of the rows that have not failed."""
    if not len(vectors):
        return
    ok = outcome.status[pooled.row] == pb.OK
    result.pooled_rows.extend(pooled.row[ok].tolist())
    result.pooled.extend(vector.astype("<f4").tobytes() for vector in vectors.numpy()[ok])


def fill_logprobs(
    result: pb.StepResult,
    gathered: Gathered,
    verdict: Verdict,
    logits: torch.Tensor,
    wants: LogprobWants,
) -> None:
    """Log-probabilities of emitted tokens and prompt positions, for the rows that want them."""
    windows, prompt = gathered.windows, gathered.prompt
    num_sampled = len(windows.length)
    emitted = emitted_logprobs(
        logits[:num_sampled],
        torch.from_numpy(windows.cu),
        verdict,
        torch.from_numpy(windows.row),
        torch.from_numpy(windows.slot),
        wants,
    )
    if emitted is not None:
        result.logprobs.CopyFrom(emitted.to_proto())
    if len(prompt.row):
        columns = token_logprobs(
            logits[num_sampled:],
            torch.from_numpy(prompt.token_id),
            torch.from_numpy(prompt.row),
            wants.num_top_prompt[torch.from_numpy(prompt.slot)],
        )
        result.prompt_logprobs.CopyFrom(columns.to_proto())


def _emitted_ids(verdict: Verdict) -> IntArray:
    """Emitted ids of all windows in order, CSR by n_emitted."""
    column = torch.arange(verdict.tokens.shape[1])
    ids: IntArray = verdict.tokens[column < verdict.n_emitted.unsqueeze(1)].numpy()
    return ids
