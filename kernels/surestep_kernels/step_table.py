"""The table of ops that keep a step on its device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .choose import Choose, choose_reference
from .commit_step import CommitStep, commit_step_reference
from .fingerprint import Fingerprint, fingerprint_reference
from .gather_step import GatherStep, gather_step_reference
from .gather_tokens import GatherTokens, gather_tokens_reference
from .shape_logits import ShapeLogits, shape_logits_reference
from .write_runs import WriteRuns, write_runs_reference


@dataclass(frozen=True, slots=True)
class StepOps:
    """One implementation of each op.

    Those of a CPU are synchronous: an op is complete when it returns, and reading its output is
    free.
    """

    write_runs: WriteRuns
    gather_step: GatherStep
    gather_tokens: GatherTokens
    shape_logits: ShapeLogits
    choose: Choose
    commit_step: CommitStep
    fingerprint: Fingerprint
    synchronous: bool = False


STEP_REFERENCE = StepOps(
    write_runs=write_runs_reference,
    gather_step=gather_step_reference,
    gather_tokens=gather_tokens_reference,
    shape_logits=shape_logits_reference,
    choose=choose_reference,
    commit_step=commit_step_reference,
    fingerprint=fingerprint_reference,
)
CPU_REFERENCE = replace(STEP_REFERENCE, synchronous=True)
