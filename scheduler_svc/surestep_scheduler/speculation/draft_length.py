"""Draft lengths of a step's rows: as many as raise tokens per second, at costs learnt from steps.

A draft is worth the probability that it is accepted, and costs an input row, its context, and its
share of the drafter's forward passes. Candidates are ordered by worth less the price of their
context, what plain decoding would yield in that time, and as many of them are taken as give the
best ratio of tokens to time. Every number of them is looked at, because measured costs are no
convex function: they rise in steps.

Workers measure costs at their start, which takes a moment, beside processes that start as well. The
steps that follow correct them: they tell better how steps of different sizes compare, which is what
draft lengths depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from surestep_common.invariants import IntArray

from .contest import Mark

FloatArray = npt.NDArray[np.float64]

_SURE = 0.99  # no draft is taken for certain


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Microseconds, as workers measure them. See StepCosts in worker.proto."""

    step: FloatArray  # of a step of n input rows, by n
    draft: FloatArray  # of one draft position of n rows, by n; draft[0] = 0
    per_context_token: float
    at_once: bool = False  # one pass drafts all positions, and `draft` is what that costs

    @classmethod
    def measured(
        cls,
        step: tuple[Sequence[int], Sequence[float]],
        draft: tuple[Sequence[int], Sequence[float]],
        per_context_token: float,
        max_tokens: int,
        *,
        at_once: bool = False,
    ) -> Self | None:
        """Interpolate points (numbers of rows, costs) up to `max_tokens`; None without points."""
        if not step[0]:
            return None
        draft_us = _curve(*draft, max_tokens)
        draft_us[0] = 0.0
        return cls(_curve(*step, max_tokens), draft_us, per_context_token, at_once)


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


class Factors(NamedTuple):
    """Tokens that drafts bring and time that they take, as multiples of what is computed."""

    tokens: float = 1.0
    time: float = 1.0


_AS_COMPUTED = Factors()


class Lookups(NamedTuple):
    """Drafts that are looked up."""

    found: FloatArray  # how often, by row [R]
    us: float  # that looking takes in a step


class DraftChoice(NamedTuple):
    """The best drafts of a step. `Factors` are in its rates, and not in other predictions."""

    lengths: IntArray  # drafts of each row [R]
    value: float  # of the best: tokens per second as a multiple of those without drafts
    price: float  # of one more row that drafts, in tokens that the time would yield otherwise
    plain_price: float  # the same in a step without drafts
    plain_us: float  # predicted time of the step without drafts, overhead included
    more_us: float  # that these drafts add
    draft_us: float  # of that, for drafting
    tokens: FloatArray  # predicted accepted drafts of each row [R]

    def without_drafts(self) -> DraftChoice:
        """Return the same step with no drafts."""
        return self._replace(
            lengths=np.zeros_like(self.lengths),
            price=self.plain_price,
            more_us=0.0,
            draft_us=0.0,
            tokens=np.zeros_like(self.tokens),
        )

    def bet(self, mark: Mark | None) -> Bet:
        """Return what is predicted of these drafts."""
        return Bet(self.tokens, self.more_us / self.plain_us, mark)


def draft_lengths(
    acceptance: FloatArray,
    caps: IntArray,
    context: IntArray,
    *,
    num_tokens: int,
    costs: StepCosts,
    overhead_us: float,
    catches_up: bool,
    lookups: Lookups | None = None,
    factors: Factors = _AS_COMPUTED,
) -> DraftChoice:
    """Choose for rows [R] that decode, within `caps` drafts each, at least one of which is above 0.

    `acceptance` is the probability that a draft is accepted when those before it were, `context`
    the length of each row in tokens, `num_tokens` the input rows of the step without drafts,
    `overhead_us` what a step takes besides, however many rows it has.
    `catches_up`: the drafter first makes up for the tokens of the step before. With `lookups` there
    is no drafter: rows draft as often as anything is found, which costs a lookup.
    """
    positions = np.arange(int(caps.max()))
    row, position = (positions < caps[:, None]).nonzero()
    gain: FloatArray = np.power(np.minimum(acceptance, _SURE)[row], position + 1.0)
    context_us = costs.per_context_token * context
    plain_us = float(costs.step[num_tokens] + context_us.sum()) + overhead_us
    without = len(caps) / plain_us
    order = ((without * factors.time) * context_us[row] - factors.tokens * gain).argsort()
    row, position, gain = row[order], position[order], gain[order]
    if lookups is None:
        tokens, reach = gain.cumsum(), num_tokens + 1
        more_us = costs.step[reach : reach + len(row)] - costs.step[num_tokens]
        more_us += context_us[row].cumsum()
        draft_us = _draft_us(position, tokens * catches_up, costs)
        more_us += draft_us
    else:
        often = lookups.found[row]
        gain = often * gain
        tokens, draft_us = gain.cumsum(), np.zeros(len(row))
        more_us = _between(costs.step, num_tokens + often.cumsum()) - costs.step[num_tokens]
        more_us += (often * context_us[row]).cumsum() + lookups.us
    rates = (len(caps) + factors.tokens * tokens) / (plain_us + factors.time * more_us)
    best = int(rates.argmax())
    rate, taken = float(rates[best]), row[: best + 1]
    lengths = np.bincount(taken, minlength=len(caps))
    drafting = costs.draft if lookups is None else None
    context_each_us = float(context_us.sum()) / len(caps)
    reach, rows = num_tokens + best + 1, int(np.count_nonzero(lengths))
    one_more_us = _rise(costs.step, reach) + _rise(drafting, rows) + context_each_us
    first_us = _rise(costs.step, num_tokens) + _rise(drafting, 0) + context_each_us
    return DraftChoice(
        lengths,
        rate / without,
        price=rate * one_more_us,
        plain_price=without * first_us,
        plain_us=plain_us,
        more_us=float(more_us[best]),
        draft_us=float(draft_us[best]),
        tokens=np.bincount(taken, gain[: best + 1], len(caps)).astype(np.float64, copy=False),
    )


def _between(costs: FloatArray, at: FloatArray) -> FloatArray:
    """Return costs of numbers of rows that are means."""
    whole = at.astype(np.int64)
    return costs[whole] + (at - whole) * (costs[whole + 1] - costs[whole])


def _rise(costs: FloatArray | None, at: int) -> float:
    """Return what one more row costs beside so many."""
    return 0.0 if costs is None else float(costs[at + 1] - costs[at])


def _draft_us(position: IntArray, tokens: FloatArray, costs: StepCosts) -> FloatArray:
    """Return the cost of the first 1, 2, .. drafts [N], at these positions of their rows.

    The first position is drafted by the pass that also makes up for `tokens` [N] accepted ones.
    """
    rows = (position == np.arange(position.max() + 1)[:, None]).cumsum(axis=1)  # [K, N]
    rows[0] += tokens.astype(np.int64)
    cost: FloatArray = costs.draft[rows[:1] if costs.at_once else rows].sum(axis=0)
    return cost


_MEMORY = 0.02  # weight of the newest step in what all steps have in common
_OWN_MEMORY = 0.05  # in what steps of its size have beyond that, or drafting has
_FIRST_WEIGHT = 4.0  # steps that the measurement counts for
_INTERRUPTED = 8.0  # times its cost: what took longer teaches nothing
_STEEPEST = 4.0  # times the measured costs
_VARIED = 0.05  # standard deviation of costs, as a share of their mean, from which a slope is seen
_REBUILT = 16  # steps after which what was learnt is used
_SIZES = 4  # that are told apart, from a number of rows to its double


class Bet(NamedTuple):
    """Prediction about the drafts that a step has of one source."""

    tokens: FloatArray | None = None  # accepted drafts of each row [R]; None = not known
    more: float = 0.0  # time that drafts add, as a share of the step without them
    mark: Mark | None = None  # if the step is part of a trial


_NONE = Bet()


class Expected(NamedTuple):
    """Expectation of a step: its time in microseconds, 0 = not known, and what its drafts bring."""

    us: float = 0.0
    draft_us: float = 0.0  # of these, for drafting
    proposed: Bet = _NONE
    looked_up: Bet = _NONE


class Took(NamedTuple):
    """Time of a step that only decoded, on the first rank, in microseconds; 0 = not known."""

    step_us: float  # without drafting
    draft_us: float


class LearntCosts:
    """Costs, and how they are corrected.

    A machine that is busy slows all steps down alike, which is learnt soon and as one factor. What
    steps of one size have beyond it, or drafting has, is learnt slowly.
    """

    def __init__(self, measured: StepCosts) -> None:
        self.now = self._measured = measured
        numbers = np.arange(len(measured.step))
        self._size = np.rint(_SIZES * np.log2(np.maximum(numbers, 1))).astype(np.int64)
        self._common = self._built = 1.0  # of all costs; in `now`
        self._own = np.ones(int(self._size[-1]) + 1)  # of steps, by size
        self._seen = np.zeros(len(self._own))
        self._draft = self._built_draft = 1.0  # of drafting; in `now`
        self._drafts_seen = 0.0
        self._steps = 0

    def of_step(self, len_before: IntArray, n_drafts: IntArray) -> float:
        """Return what a step of rows [R], of these lengths and so many drafts, should take."""
        tokens, context = self._shape(len_before, n_drafts)
        return float(self.now.step[tokens]) + self.now.per_context_token * context

    def _shape(self, len_before: IntArray, n_drafts: IntArray) -> tuple[int, float]:
        """Return the input rows of such a step, as many as there are costs for, and the tokens of
        context that they see."""
        tokens = min(len(n_drafts) + int(n_drafts.sum()), len(self._size) - 1)
        return tokens, float(len_before @ (n_drafts + 1))

    def observe(
        self, expected: Expected, took: Took, len_before: IntArray, n_drafts: IntArray
    ) -> None:
        """Learn from a step of rows [R], of these lengths and with so many drafts each."""
        tokens, context = self._shape(len_before, n_drafts)
        size, measured = self._size[tokens], self._measured
        alike_us = float(self._own[size] * measured.step[tokens])
        alike_us += measured.per_context_token * context
        untold = expected.draft_us > 0 and not took.draft_us  # a device may not tell it apart
        if untold or not 0 < took.step_us < _INTERRUPTED * self._common * alike_us:
            return
        self._common += _weight(self._steps, _MEMORY) * (took.step_us / alike_us - self._common)
        self._seen[size] += 1
        if size != self._seen.argmax():  # which is what the others are compared with
            beyond = took.step_us / (alike_us * self._common) - 1
            self._own[size] *= 1 + _weight(self._seen[size], _OWN_MEMORY) * beyond
        if expected.draft_us:
            measured_us = expected.draft_us / (self._built * self._built_draft)
            beyond = took.draft_us / (measured_us * self._common) - self._draft
            self._draft += _weight(self._drafts_seen, _OWN_MEMORY) * beyond
            self._drafts_seen += 1
        self._steps += 1
        if self._steps % _REBUILT == 0:
            self._rebuild()

    def _rebuild(self) -> None:
        measured, self._built, self._built_draft = self._measured, self._common, self._draft
        self.now = StepCosts(
            rising(measured.step * self._own[self._size]) * self._common,
            measured.draft * self._draft * self._common,
            measured.per_context_token * self._common,
            measured.at_once,
        )


def _weight(seen: float, least: float) -> float:
    """Weight of the newest observation in a running mean over `seen` earlier ones."""
    return max(least, 1 / (seen + _FIRST_WEIGHT))


class Overhead:
    """Time of a step besides its cost on the workers.

    A running linear fit of actual to expected durations: actual = slope * expected + constant. Only
    ratios of costs matter, so what counts is the constant in units of the slope.
    """

    def __init__(self) -> None:
        self.us = 0.0
        self._means = np.zeros(4)  # of x, y, x * x and x * y
        self._weight = 0.0

    def observe(self, expected_us: float, actual_us: float) -> None:
        """Learn from a step that was expected to take `expected_us` > 0."""
        if actual_us > _INTERRUPTED * expected_us:
            return
        x, y = expected_us, actual_us
        self._weight += _MEMORY * (1 - self._weight)
        self._means += _MEMORY * (np.array([x, y, x * x, x * y]) - self._means)
        x, y, xx, xy = (self._means / self._weight).tolist()
        variance = xx - x * x
        slope = (xy - x * y) / variance if variance > (_VARIED * x) ** 2 else 1.0
        slope = min(max(slope, 1.0), _STEEPEST)
        self.us = max(y - slope * x, 0.0) / slope
