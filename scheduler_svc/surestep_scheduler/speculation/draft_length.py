"""Choose the number of drafts of each row of a step: as many as raise tokens per second.

A draft is worth the probability that it is accepted, and costs an input row, its context, and its
share of the drafter's forward passes. Candidates are ordered by worth less the price of their
context, what plain decoding would yield in that time, and as many of them are taken as give the
best ratio of tokens to time. Every number of them is looked at, because measured costs are no
convex function: they rise in steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from surestep_common.invariants import IntArray

FloatArray = npt.NDArray[np.float64]

_WORTHWHILE = 1.05  # tokens per second against those without drafts; less is within the noise
_SURE = 0.99  # no draft is taken for certain


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Microseconds, as workers measure them. See StepCosts in worker.proto."""

    step: FloatArray  # of a step of n input rows, by n
    draft: FloatArray  # of one draft position of n rows, by n; draft[0] = 0
    per_context_token: float

    @classmethod
    def measured(
        cls,
        step: tuple[Sequence[int], Sequence[float]],
        draft: tuple[Sequence[int], Sequence[float]],
        per_context_token: float,
        max_tokens: int,
    ) -> Self | None:
        """Interpolate points (numbers of rows, costs) up to `max_tokens`; None without points."""
        if not step[0]:
            return None
        draft_us = _curve(*draft, max_tokens)
        draft_us[0] = 0.0
        return cls(_curve(*step, max_tokens), draft_us, per_context_token)


def _curve(rows: Sequence[int], costs: Sequence[float], max_tokens: int) -> FloatArray:
    """Return costs by number of rows, up to twice the longest step: drafts may replace prompts."""
    number = np.arange(2 * max_tokens + 1)
    if not rows:
        return np.zeros(len(number))
    points = rising(np.array(costs))
    curve = np.interp(number, rows, points)
    if len(rows) > 1:
        slope = (points[-1] - points[-2]) / (rows[-1] - rows[-2])
        curve += slope * np.maximum(number - rows[-1], 0)
    return curve


def rising(costs: FloatArray) -> FloatArray:
    """Meet fluctuations in the middle, so that more rows never seem to cost less."""
    middle: FloatArray = np.maximum.accumulate(costs)
    middle += np.minimum.accumulate(costs[::-1])[::-1]
    return middle / 2


class DraftChoice(NamedTuple):
    """Drafts of a step."""

    lengths: IntArray  # drafts of each row [R]
    price: float  # of one more row that drafts, in tokens that the time would yield otherwise
    cost_us: float  # of the step, overhead left out
    draft_us: float  # of that, for drafting


def draft_lengths(
    acceptance: FloatArray,
    caps: IntArray,
    context: IntArray,
    *,
    num_tokens: int,
    costs: StepCosts,
    overhead_us: float,
    catches_up: bool,
    looked_up: bool = False,
) -> DraftChoice:
    """Choose for rows [R] that decode, within `caps` drafts each, at least one of which is above 0.

    `acceptance` is the probability that a draft is accepted when those before it were, `context`
    the length of each row in tokens, `num_tokens` the input rows of the step without drafts,
    `overhead_us` what a step takes besides, however many rows it has.
    `catches_up`: the drafter first makes up for the tokens of the step before; `looked_up`: there
    is no drafter, drafts cost their rows and nothing else.
    """
    candidates = np.arange(caps.max()) < caps[:, None]
    row, position = np.nonzero(candidates)
    chances = np.repeat(np.minimum(acceptance, _SURE)[:, None], caps.max(), axis=1)
    gain = chances.cumprod(axis=1)[candidates]
    context_us = costs.per_context_token * context
    plain_us = float(costs.step[num_tokens] + context_us.sum()) + overhead_us
    without = len(caps) / plain_us
    order = (without * context_us[row] - gain).argsort()
    tokens = gain[order].cumsum()
    step_us = costs.step[num_tokens + 1 : num_tokens + 1 + len(row)] - costs.step[num_tokens]
    drafting = np.zeros_like(costs.draft) if looked_up else costs.draft
    draft_us = _draft_us(position[order], tokens * catches_up, drafting)
    more_us = step_us + context_us[row[order]].cumsum() + draft_us
    rates = (len(caps) + tokens) / (plain_us + more_us)
    best = int(rates.argmax())
    rate = float(rates[best])
    if rate < _WORTHWHILE * without:
        rate, best = without, -1
    more, spent = (float(more_us[best]), float(draft_us[best])) if best >= 0 else (0.0, 0.0)
    lengths = np.bincount(row[order[: best + 1]], minlength=len(caps))
    reach, rows = num_tokens + best + 1, int(np.count_nonzero(lengths))
    one_more_us = np.diff(costs.step[reach : reach + 2]) + np.diff(drafting[rows : rows + 2])
    price = float(rate * (one_more_us[0] + context_us.mean()))
    return DraftChoice(lengths, price, plain_us - overhead_us + more, spent)


def _draft_us(position: IntArray, tokens: FloatArray, draft: FloatArray) -> FloatArray:
    """Return the cost of the first 1, 2, .. drafts [N], at these positions of their rows.

    The first position is drafted by the pass that also makes up for `tokens` [N] accepted ones.
    """
    rows = (position == np.arange(position.max() + 1)[:, None]).cumsum(axis=1)  # [K, N]
    rows[0] += tokens.astype(np.int64)
    cost: FloatArray = draft[rows].sum(axis=0)
    return cost
