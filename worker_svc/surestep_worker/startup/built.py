"""A rank that is built: the result, and what the log says of it meanwhile and at the end."""

from __future__ import annotations

import logging
from typing import NamedTuple

from surestep_proto import supervisor_pb2
from surestep_proto import worker_pb2 as pb

from surestep_worker.checkpoint.parameters import Progress
from surestep_worker.host.host_memory import GIB
from surestep_worker.step.heartbeat import Heartbeat
from surestep_worker.step.runner import Runner

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_PROGRESS_STEP = 0.1  # of the checkpoint, between two log lines


class Built(NamedTuple):
    """A runner ready for its first epoch, and the facts the Worker service reports of it."""

    runner: Runner
    facts: pb.WorkerInfo
    checkpoint: str = ""  # its fingerprint

    @property
    def profile_result(self) -> bytes:
        """Return what was measured and decided, for the rank that comes after this one."""
        names = pb.ProfileResult.DESCRIPTOR.fields_by_name
        found = {name: getattr(self.facts, name) for name in names}
        return pb.ProfileResult(**found).SerializeToString()


def facts_of(known: pb.ProfileResult) -> pb.WorkerInfo:
    """Return the facts that an earlier rank measured and decided."""
    return pb.WorkerInfo(**{field.name: value for field, value in known.ListFields()})


def show_progress(heartbeat: Heartbeat) -> Progress:
    """Log every tenth of the checkpoint; `surestep serve` draws a progress bar from these lines."""
    logged = -1.0

    def progress(done: int, total: int) -> None:
        nonlocal logged
        heartbeat.progress(supervisor_pb2.LOADING)
        share = done / total
        if share - logged >= _PROGRESS_STEP or (done == total and logged < 1):
            logged = share
            logger.info("loading weights: %d of %d MB", done >> 20, max(total >> 20, 1))

    return progress


def log_facts(facts: pb.WorkerInfo) -> None:
    """Log a summary of the rank."""
    logger.info(
        "%s, %s on %s: %d slots, %d KV blocks of %d tokens (%.2f GiB), drafter %s, K = %d",
        facts.architecture,
        facts.dtype,
        facts.device,
        facts.num_slots,
        facts.num_blocks,
        facts.block_size,
        facts.kv_cache_bytes / GIB,
        facts.drafter or "none",
        facts.max_draft_tokens,
    )
    if facts.drafts_because:
        why = "%s drafts: %s; --speculative-config none turns it off"
        logger.info(why, facts.drafter, facts.drafts_because)
    if any(facts.kv_windows):
        windows = ", ".join(str(window or "all") for window in facts.kv_windows)
        logger.info("layers by the positions that a token sees: %s; each has its blocks", windows)
    if facts.recurrent:
        logger.info(
            "recurrent state: %.2f MiB per slot (1 state, %d records), %d snapshots",
            facts.state_bytes_per_slot / _MIB,
            facts.max_draft_tokens + 1,
            facts.num_snapshots,
        )
    if facts.drafter_recurrent:
        logger.info("the draft model keeps two states per slot, and reads cached prefixes itself")
    if facts.programmatic_dependent_launch:
        logger.info("kernels start while those before them end: programmatic dependent launch")
