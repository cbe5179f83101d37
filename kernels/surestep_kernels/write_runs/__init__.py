"""Write runs of words to places in memory."""

from __future__ import annotations

from .reference import Runs, WriteRuns, write_runs_reference

__all__ = ["Runs", "WriteRuns", "write_runs_reference"]
