"""A step between its launch and its result."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from surestep_common.errors import InternalError
from surestep_common.invariants import FloatArray, Int32Array, IntArray, check_lengths
from surestep_kernels.commit_step import Report
from surestep_proto import worker_pb2 as pb

from surestep_worker.cache.caches import Caches
from surestep_worker.cache.held_caches import Grown

from .batch import Geometry, Pooled
from .drafting import Drafting
from .logprobs import LogprobPlan, Score
from .order import Guided, StepOrder
from .plan import Rows, SnapshotRequests, check_caught_up
from .slots import Slots
from .transfer import Download

HostReport = Report[IntArray]


class LaunchedStep(NamedTuple):
    """Step that the host keeps until its result."""

    rows: Rows
    requested: SnapshotRequests
    geometry: Geometry
    logprobs: LogprobPlan | None
    guided: Guided
    download: Download
    drafter_skipped: bool
    drafter_faults: int
    timings: pb.Timings  # those known at launch
    launched_ns: int  # by perf_counter_ns


class Pending(Protocol):
    """A step that has been launched, as the step loop sees it."""

    @property
    def done(self) -> bool:
        """Return whether `finish` has nothing to wait for."""

    def wait(self) -> None:
        """Block until the device has finished the step. Called from any thread."""

    def finish(self) -> pb.StepResult:
        """Advance the host's slots and return the result. Call it in the order of launches.

        Raises LedgerError, which ends the epoch.
        """


class PendingStep:
    """A step whose results are being copied to the host; implements Pending."""

    def __init__(self, results: Results, plan: pb.StepPlan, launched: LaunchedStep) -> None:
        self._results, self._plan, self._launched = results, plan, launched

    @property
    def done(self) -> bool:
        return self._launched.download.arrived

    def wait(self) -> None:
        self._launched.download.wait()

    def finish(self) -> pb.StepResult:
        return self._results.read(self._plan, self._launched)


class Results:
    """Reads the results of steps: checks them, advances the host's slots, and reports them."""

    def __init__(
        self,
        slots: Slots,
        caches: Caches,
        drafting: Drafting,
        order: StepOrder,
        rank: int,
        missed_kind: Callable[[], int],
    ) -> None:
        self._slots, self._recurrent, self._held = slots, caches.recurrent, caches.held
        self._drafting, self._order, self._rank = drafting, order, rank
        self._missed_kind = missed_kind

    def read(self, plan: pb.StepPlan, launched: LaunchedStep) -> pb.StepResult:
        """Return the result of a plan's step that has arrived. Raises LedgerError."""
        began_ns = time.perf_counter_ns()
        packed, error, fingerprint, non_finite, *read = launched.download.tensors()
        means, label_logits, *scores = read
        if int(error):
            raise InternalError("the device met a slot, block or position that does not exist")
        num_rows = len(launched.rows)  # followed by padding
        rows, columns = launched.rows, Report.of(packed[:num_rows].long())
        report = HostReport(*(column.numpy() for column in columns))
        begun = report.len_before
        check_lengths(slot=rows.slot, len_lo=rows.len_lo, len_hi=rows.len_hi, length=begun)
        pooled = launched.geometry.pooled
        vectors = pooled_vectors(pooled, means, label_logits)
        mark_non_finite_vectors(report, pooled, vectors)
        taken = self._taken(launched, report.folded)
        self._commit(plan.step, launched, report)
        result = self._result(plan, launched, report, int(fingerprint))
        result.draft_non_finite_rows.extend(non_finite[:num_rows].nonzero().flatten().tolist())
        self._report_snapshots(result, launched.requested, taken)
        if self._rank == 0:
            fill_vectors(result, report, pooled, vectors)
            _fill_logprobs(result, launched, report, scores)
        result.timings.CopyFrom(launched.timings)
        self._order.finished(result.timings, launched.launched_ns, began_ns)
        return result

    def _taken(self, launched: LaunchedStep, folded: IntArray) -> IntArray:
        """Return the indices of the requested snapshots that were taken."""
        requested, slots = launched.requested, self._slots
        after = np.zeros(slots.num_slots, dtype=np.int64)
        after[launched.rows.slot] = folded
        before = slots.folded[requested.slot]
        return np.flatnonzero(
            (before < requested.length) & (requested.length <= after[requested.slot])
        )

    def _commit(self, step: int, launched: LaunchedStep, report: HostReport) -> None:
        slots, rows = self._slots, launched.rows
        committed, drafter_len = slots.committed[rows.slot], slots.drafter_len[rows.slot]
        slots.drafter_len[rows.slot] = report.drafter_len
        if self._drafting.has_state and not launched.drafter_skipped:
            check_caught_up(rows, slots)
        consumed = np.where(rows.is_prefill, rows.num_tokens, report.n_emitted)
        consumed[report.status != pb.OK] = 0
        counts = consumed, report.n_accepted, report.n_emitted
        slots.commit(step, rows.slot, report.folded, *counts)
        if self._held is not None:
            where = slots.block_tables, rows.slot
            self._held.seal_blocks(*where, Grown(committed, slots.committed[rows.slot]))
            self._held.seal_drafted(*where, Grown(drafter_len, report.drafter_len))
        self._drafting.observe(rows, report.n_drafts, report.n_accepted)

    def _result(
        self, plan: pb.StepPlan, launched: LaunchedStep, report: HostReport, fingerprint: int
    ) -> pb.StepResult:
        rows, slots = launched.rows, self._slots
        result = pb.StepResult(epoch=plan.epoch, step=plan.step, rank=self._rank)
        ids = emitted_ids(report)
        result.digest = digest(report, ids, slots.committed[rows.slot], fingerprint)
        result.drafter_faults = launched.drafter_faults
        result.drafter_skipped = launched.drafter_skipped
        if self._rank == 0:
            result.missed_kind = self._missed_kind()
            fill_rows(result, rows, report, ids)
            launched.guided.report(result)
            result.drafter_len.extend(slots.drafter_len[rows.slot].tolist())
        return result

    def _report_snapshots(
        self, result: pb.StepResult, requested: SnapshotRequests, taken: IntArray
    ) -> None:
        if self._recurrent is not None:
            self._recurrent.mark_taken(requested.id[taken], requested.length[taken])
            if self._held is not None and len(taken):
                self._held.seal_snapshots(requested.id[taken], requested.length[taken])
            result.snapshot_ids_taken.extend(requested.id[taken].tolist())


def _fill_logprobs(
    result: pb.StepResult,
    launched: LaunchedStep,
    report: HostReport,
    scores: Sequence[torch.Tensor],
) -> None:
    """Fill in the log-probabilities that are reported of the step, if any are."""
    if launched.logprobs is not None:
        window = launched.geometry.window_row
        emitted = report.tokens[window], report.n_emitted[window]
        launched.logprobs.fill(result, launched.geometry, *emitted, Score(*scores))


def digest(report: HostReport, ids: IntArray, committed: IntArray, hidden_fingerprint: int) -> int:
    """Hash tokens, counts, slot lengths after the step and final hidden states into 64 bits."""
    hasher = hashlib.blake2b(digest_size=8)
    for array in (report.n_drafts, report.status, report.n_accepted, committed):
        hasher.update(array.tobytes())
    hasher.update(ids.tobytes())
    hasher.update(hidden_fingerprint.to_bytes(8, "little", signed=True))
    return int.from_bytes(hasher.digest(), "little")


def fill_rows(result: pb.StepResult, rows: Rows, report: HostReport, ids: IntArray) -> None:
    """Fill the row columns, in the plan's order, and the emitted ids."""
    result.slot.extend(rows.slot.tolist())
    result.slot_epoch.extend(rows.slot_epoch.tolist())
    result.status.extend(report.status.tolist())
    result.len_before.extend(report.len_before.tolist())
    result.n_drafts.extend(report.n_drafts.tolist())
    result.n_accepted.extend(report.n_accepted.tolist())
    result.n_emitted.extend(report.n_emitted.tolist())
    result.token_ids.extend(ids.tolist())


def pooled_vectors(
    pooled: Pooled[Int32Array], means: torch.Tensor, label_logits: torch.Tensor
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
    report: HostReport, pooled: Pooled[Int32Array], vectors: Sequence[FloatArray]
) -> None:
    """Set the status of rows whose vectors are not finite."""
    for row, vector in zip(pooled.row, vectors, strict=True):
        if not np.isfinite(vector).all():
            report.status[row] = pb.NON_FINITE


def fill_vectors(
    result: pb.StepResult,
    report: HostReport,
    pooled: Pooled[Int32Array],
    vectors: Sequence[FloatArray],
) -> None:
    """Fill in the vectors of the rows that have not failed."""
    for row, vector in zip(pooled.row.tolist(), vectors, strict=True):
        if report.status[row] == pb.OK:
            result.pooled_rows.append(row)
            result.pooled.append(vector.astype("<f4").tobytes())


def emitted_ids(report: HostReport) -> IntArray:
    """Return the emitted ids, grouped by row: the first n_emitted [R] of tokens [R, K+1]."""
    tokens = report.tokens
    ids: IntArray = tokens[np.arange(tokens.shape[1]) < report.n_emitted[:, None]]
    return ids
