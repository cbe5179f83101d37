"""Check and measure a model before its rank is ready: finite output, step costs, drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from surestep_common.errors import InvalidRequest
from surestep_proto import supervisor_pb2

from surestep_worker.checkpoint.finite import non_finite_tensors
from surestep_worker.models import DraftHead, ModelSource
from surestep_worker.step.runner import Runner

from .built import Built
from .profile import Check, check_drafter, measure_costs, output_is_finite
from .speculation import Speculation

logger = logging.getLogger(__name__)


class _Trial(NamedTuple):
    built: Built
    check: Check  # the same on all ranks


def try_out(
    start: Callable[[], Built],
    source: ModelSource,
    speculation: Speculation,
    *,
    require_drafter: bool,
) -> Built:
    """Start a rank and add to its facts what is found.

    It is started again where its draft head reads the wrong layers of the model, without a head
    that drafts nothing, and without one that was not asked for and of whose drafts hardly any is
    accepted. Raises InvalidRequest for a model that is broken, and for such a head where a drafter
    is required.
    """
    built = start()
    _check_logits(built.runner, source)
    if not built.facts.max_draft_tokens:
        return built
    model, trial = built.runner.context.model, _tried(built)
    del built  # so that its caches are freed where others are made
    head = model.draft_head
    if head is not None and trial.check.is_low and head.other_layers is not None:
        check = trial.check
        del trial
        trial = _read_otherwise(head, check, start)
    if head is not None and (trial.check.failed or (trial.check.is_low and speculation.because)):
        check = trial.check
        del trial
        model.draft_head = None
        if require_drafter or not speculation.because:
            return _without_head(start, required=require_drafter)
        logger.warning("drafter check: %s: what repeats itself is looked up instead", check)
        trial = _tried(start())
    built, check = trial
    built.facts.check_drafts, built.facts.check_accepted = check.drafts, check.accepted
    head = model.draft_head
    built.facts.draft_layers.extend(head.captured_layers if head is not None else ())
    built.facts.costs.CopyFrom(measure_costs(built.runner))
    if check.drafts:
        level = logging.WARNING if check.is_low else logging.INFO
        logger.log(level, "drafter check: %s", check)
    return built


def try_again(built: Built, source: ModelSource) -> None:
    """Check a rank whose weights are others than those that were tried out, and tell of its drafts.

    Raises InvalidRequest for a model that is broken.
    """
    _check_logits(built.runner, source)
    if not built.facts.max_draft_tokens:
        return
    check = _tried(built).check
    before = Check(0, built.facts.check_drafts, built.facts.check_accepted)
    built.facts.check_drafts, built.facts.check_accepted = check.drafts, check.accepted
    if check.drafts:
        level = logging.WARNING if check.is_low else logging.INFO
        logger.log(level, "drafter check: %s with these weights, %s with others", check, before)


def _tried(built: Built) -> _Trial:
    counts = torch.tensor(check_drafter(built.runner))
    return _Trial(built, Check(*built.runner.context.tp.broadcast(counts).tolist()))


def _read_otherwise(head: DraftHead, check: Check, start: Callable[[], Built]) -> _Trial:
    """Start with the other layers that the head's config.json may mean, or again as it was."""
    assert head.other_layers is not None
    first, head.captured_layers = head.captured_layers, head.other_layers
    trial = _tried(start())
    outcome = (
        f"{check} behind layers {first} of the model, {trial.check} behind {head.other_layers}"
    )
    if trial.check.accepted > check.accepted:
        logger.warning("drafter check: %s: it reads the latter", outcome)
        return trial
    logger.warning("drafter check: %s: it reads the former", outcome)
    del trial
    head.captured_layers = first
    return _Trial(start(), check)


def _without_head(start: Callable[[], Built], *, required: bool) -> Built:
    fault = "the drafter drafts nothing: it fails, or its logits are not finite"
    if required:
        raise InvalidRequest(fault, param="speculative_config")
    logger.error("%s; the model is served without speculation", fault)
    built = start()
    built.facts.drafter_fault = fault
    return built


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
