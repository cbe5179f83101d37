"""Result of building a rank."""

from __future__ import annotations

from typing import NamedTuple

from surestep_proto import worker_pb2 as pb

from surestep_worker.step.runner import Runner


class Built(NamedTuple):
    """A runner ready for its first epoch, and the facts the Worker service reports of it."""

    runner: Runner
    facts: pb.WorkerInfo
    checkpoint: str = ""  # its fingerprint

    @property
    def profile_result(self) -> bytes:
        """Measurements and decisions, for the rank that comes after this one."""
        facts = self.facts
        return pb.WorkerInfo(
            costs=facts.costs,
            check_drafts=facts.check_drafts,
            check_accepted=facts.check_accepted,
            drafter_fault=facts.drafter_fault,
            draft_layers=facts.draft_layers,
            num_blocks=facts.num_blocks,
            num_snapshots=facts.num_snapshots,
            linear_backend=facts.linear_backend,
            memory=facts.memory,
        ).SerializeToString()
