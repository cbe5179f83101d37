"""Check and measure a model before its rank is ready: finite output, step costs, drafts."""

from __future__ import annotations

import logging

import torch
from surestep_common.errors import InvalidRequest
from surestep_proto import supervisor_pb2
from surestep_proto import worker_pb2 as pb

from surestep_worker.checkpoint.finite import non_finite_tensors
from surestep_worker.models import ModelSource
from surestep_worker.step.runner import Runner

from .profile import check_drafter, measure_costs, output_is_finite

logger = logging.getLogger(__name__)

_CHECK_FLOOR = 0.05  # share of drafts: a sound head reaches several times as much on any text


def try_out(runner: Runner, facts: pb.WorkerInfo, source: ModelSource) -> None:
    """Add the results to `facts`. Raises InvalidRequest for a broken model."""
    _check_logits(runner, source)
    if not facts.max_draft_tokens:
        return
    facts.costs.CopyFrom(measure_costs(runner))
    check = check_drafter(runner)
    facts.check_drafts, facts.check_accepted = check
    if not check.drafts:
        return
    level = logging.WARNING if check.accepted < _CHECK_FLOOR * check.drafts else logging.INFO
    logger.log(level, "drafter check: %d of %d drafts accepted", check.accepted, check.drafts)


def _check_logits(runner: Runner, source: ModelSource) -> None:
    """Raise InvalidRequest, naming the tensors at fault, if the model's output is not finite."""
    context = runner.context
    if bool(context.tp.broadcast(torch.tensor([output_is_finite(runner)])).item()):
        return
    broken = non_finite_tensors(
        source.entries, lambda: context.heartbeat.progress(supervisor_pb2.LOADING)
    )
    reason = "; ".join(broken) or "although every weight that could be read is"
    what = "logits" if context.model.has_head else "hidden states"
    raise InvalidRequest(f"the model's {what} are not finite: {reason}", param="model")
