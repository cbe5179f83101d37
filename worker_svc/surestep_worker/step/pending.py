"""Steps between their launch and their result."""

from __future__ import annotations

from typing import Protocol

from surestep_proto import worker_pb2 as pb


class Pending(Protocol):
    """A step under way."""

    @property
    def done(self) -> bool:
        """Whether `finish` has nothing to wait for."""

    def wait(self) -> None:
        """Return when the device is through with the step. Any thread may wait."""

    def finish(self) -> pb.StepResult:
        """Settle the books and report. Steps finish in the order in which they were launched.

        Raises LedgerError; the epoch is then over.
        """
