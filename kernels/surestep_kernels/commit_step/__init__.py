"""Judge drafts, advance the slots, and report what rows emitted."""

from __future__ import annotations

from .reference import CommitStep, Report, StopIds, commit_step_reference, report_width

__all__ = ["CommitStep", "Report", "StopIds", "commit_step_reference", "report_width"]
