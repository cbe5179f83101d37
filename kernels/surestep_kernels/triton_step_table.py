"""The table of ops that keep a step on a GPU."""

from __future__ import annotations

from surestep_kernels.choose.triton import choose
from surestep_kernels.commit_step.triton import commit_step
from surestep_kernels.fingerprint.triton import fingerprint
from surestep_kernels.gather_step.triton import gather_step
from surestep_kernels.gather_tokens.triton import gather_tokens
from surestep_kernels.shape_logits.triton import shape_logits
from surestep_kernels.write_runs.triton import write_runs

from .step_table import StepOps

STEP_OPS = StepOps(
    write_runs=write_runs,
    gather_step=gather_step,
    gather_tokens=gather_tokens,
    shape_logits=shape_logits,
    choose=choose,
    commit_step=commit_step,
    fingerprint=fingerprint,
)
