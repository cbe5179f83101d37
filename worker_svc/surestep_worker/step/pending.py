"""What the step loop knows of a step between its launch and its result."""

from __future__ import annotations

from typing import Protocol

from surestep_proto import worker_pb2 as pb


class Pending(Protocol):
    """A step that has been launched."""

    @property
    def done(self) -> bool:
        """Whether `finish` has nothing to wait for."""

    def wait(self) -> None:
        """Block until the device has finished the step. Called from any thread."""

    def finish(self) -> pb.StepResult:
        """Advance the host's slots and return the result. Call it in the order of launches.

        Raises LedgerError, which ends the epoch.
        """
