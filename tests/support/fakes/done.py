"""A step without work."""

from __future__ import annotations

from typing import NamedTuple

from surestep_proto import worker_pb2 as pb


class Done(NamedTuple):
    """A step that was over when it was launched."""

    result: pb.StepResult
    done: bool = True

    def wait(self) -> None:
        """Nothing is under way."""

    def finish(self) -> pb.StepResult:
        """The result."""
        return self.result
