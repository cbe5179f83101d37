"""The table of ops that keep a step on a GPU."""

from __future__ import annotations

from surestep_kernels.gpu.sampling.choose import choose
from surestep_kernels.step.step_ops import StepOps

from .commit_step import commit_step
from .fingerprint import fingerprint
from .gather_step import gather_step
from .gather_tokens import gather_tokens
from .shape_logits import shape_logits
from .write_runs import write_runs

STEP_OPS = StepOps(
    write_runs=write_runs,
    gather_step=gather_step,
    gather_tokens=gather_tokens,
    shape_logits=shape_logits,
    choose=choose,
    commit_step=commit_step,
    fingerprint=fingerprint,
)
