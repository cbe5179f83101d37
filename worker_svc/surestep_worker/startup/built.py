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
        """Return what was measured and decided, for the rank that comes after this one."""
        names = pb.ProfileResult.DESCRIPTOR.fields_by_name
        found = {name: getattr(self.facts, name) for name in names}
        return pb.ProfileResult(**found).SerializeToString()


def facts_of(known: pb.ProfileResult) -> pb.WorkerInfo:
    """Return the facts that an earlier rank measured and decided."""
    return pb.WorkerInfo(**{field.name: value for field, value in known.ListFields()})
