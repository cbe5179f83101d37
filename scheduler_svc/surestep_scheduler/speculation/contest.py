"""Drafting against not drafting, in steps that were run: outcomes correct predictions.

Costs and acceptance predict how many tokens drafts bring and how long they take. Two factors say
how that turns out. Tokens are counted in every step that drafts. Time is compared in trials, for a
machine is faster at one moment and slower at the next: a stretch of steps as they would be anyhow,
a stretch of the other way, drafts instead of none or none instead of drafts, and a stretch as
before. The time that drafts add, as a share of a step without them, is fitted to what was predicted
by least squares, in batches of about the same size; what is known of the others is the start.

A trial costs what the worse way loses in it, and what a drafter has to make up for. It is held when
that is within a share of the time, which shrinks with each trial: where both ways are about as
good, and another look is worth most, trials are cheap and many.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import numpy as np

_STRETCH = 8  # steps of a stretch that count
_SETTLING = 2  # steps before them: a drafter makes up for what it missed
_LEAST = 4  # that a stretch must have had, of those that count
_MOST_WAITS = 16  # steps with prompts that a trial waits through
_STEADY = (
    24  # steps of its size before a trial: of batches that grow or shrink none comes to an end
)
_TRIMMED = 8  # one step in so many is left out of a mean at either end

_STAY = 32  # steps in which drafts should make good what the drafter makes up for first

_SHARE = 0.003  # of the time that trials may take
_FIRST_SHARE = 0.01  # the same before the first
_LEAST_LOSS = 0.03  # of a step: what the worse way loses is not known better
_FADE = 15 / 16  # weight of earlier trials, per trial
_DOUBT = 0.01  # squared share of a step's time: how firmly a factor of 1 is believed at first
_CHEAPEST, _DEAREST = 0.25, 4.0  # factors of the time
_MAY_BE_OFF = 2.0  # times that costs and trials may be from the truth, either way

_TOKENS = 64.0  # predicted ones that the first guess counts for
_TOKENS_MEMORY = 512.0  # that are remembered
_FORGOTTEN = 2000  # steps without drafts in which most of what was accepted is forgotten


class Bar(NamedTuple):
    """Values at which drafts begin, and end: between them steps go on as before."""

    begin: float
    end: float


WITH_STATE = Bar(1.02, 0.99)  # a drafter makes up for what it missed whenever it begins
WITHOUT_STATE = Bar(1.03, 1.03)


class Stretch(IntEnum):
    """Part of a trial."""

    BEFORE = 0
    OTHERWISE = 1
    AFTER = 2


class Trial:
    """Times of steps, in microseconds, by stretch."""

    def __init__(self, size: int, drafts: bool) -> None:
        """`drafts`: the stretch in the middle drafts, and the others do not."""
        self.size, self.drafts = size, drafts
        self.times: tuple[list[float], ...] = ([], [], [])
        self.more: list[float] = []  # predicted time of drafts, as a share of a step without them
        self.num_planned = self.num_open = self.num_waits = 0

    @property
    def stretch(self) -> Stretch:
        """Stretch of the next step."""
        return Stretch(self.num_planned // (_SETTLING + _STRETCH))

    def drafts_in(self, stretch: Stretch) -> bool:
        return self.drafts == (stretch == Stretch.OTHERWISE)

    @property
    def is_planned(self) -> bool:
        return self.num_planned == len(Stretch) * (_SETTLING + _STRETCH)

    def result(self) -> tuple[float, float] | None:
        """Return the time that drafts add, as a share of a step without them: predicted, actual."""
        before, other, after = self.times
        if min(map(len, self.times)) < _LEAST or not self.more:
            return None
        usual, otherwise = _mean(before + after), _mean(other)
        drafting, plain = (otherwise, usual) if self.drafts else (usual, otherwise)
        return float(np.mean(self.more)), drafting / plain - 1


class Mark(NamedTuple):
    """Place of a step in a trial."""

    trial: Trial
    stretch: Stretch
    counts: bool


class Outlook(NamedTuple):
    """Prediction of a step of decoding rows with the best drafts, and without."""

    rows: int
    plain_us: float  # without drafts
    more_us: float  # that drafts add
    gain: float  # tokens that drafts bring, as a share of those without; what was learnt is in it
    catch_up_us: float  # that a drafter would take first which has not drafted of late

    def value(self, time: float) -> float:
        """Return tokens per second as a multiple of those without drafts, at a factor of time."""
        more_us = time * self.more_us + self.catch_up_us / _STAY
        return (1 + self.gain) * self.plain_us / (self.plain_us + more_us)


class Way(NamedTuple):
    """Decision for a step."""

    drafts: bool
    mark: Mark | None


class Fit(NamedTuple):
    """Trials of batches of about the same size, faded: sums of what least squares need."""

    squares: float = 0.0  # of predicted shares
    products: float = 0.0  # with actual ones

    def add(self, predicted: float, actual: float) -> Fit:
        return Fit(
            _FADE * self.squares + predicted * predicted,
            _FADE * self.products + predicted * actual,
        )

    def factor(self, prior: float) -> float:
        """Return actual as a multiple of predicted time."""
        fitted = (self.products + _DOUBT * prior) / (self.squares + _DOUBT)
        return min(max(fitted, _CHEAPEST), _DEAREST)


class Standing(NamedTuple):
    """Newest decision about steps of a size."""

    rows: int  # at most
    value: float  # of the best drafts
    drafts: bool
    time: float  # that drafts add, as a multiple of predicted
    num_trials: int  # with a result


class Contest:
    """Trials, and the factors that they and all drafts have shown. Batches are told apart by their
    size in powers of two."""

    def __init__(self, bar: Bar = WITH_STATE) -> None:
        self._bar = bar
        self._num_trials: Counter[int] = Counter()  # with a result, by size
        self._decided: dict[int, tuple[float, bool]] = {}  # value and decision, by size
        self._accepted = self._predicted = _TOKENS
        self._all = Fit()
        self._by_size: defaultdict[int, Fit] = defaultdict(Fit)
        self._num_begun: Counter[int] = Counter()
        self._trial: Trial | None = None
        self._newest_size, self._num_alike = 0, 0  # of decoding steps in a row
        self._credit_us = 0.0
        self.drafts = True  # the newest decision, trials aside

    @property
    def tokens(self) -> float:
        """Return accepted drafts as a multiple of predicted ones."""
        return self._accepted / self._predicted

    def time(self, rows: int) -> float:
        """Return the time that drafts add to a step of so many rows, as a multiple of predicted."""
        return self._by_size[_size(rows)].factor(self._all.factor(1.0))

    @property
    def in_trial(self) -> bool:
        """Return whether a trial is under way."""
        return self._trial is not None

    def abandon(self) -> None:
        """End a trial without result: its steps are lost, or of no use."""
        self._trial = None

    def standings(self) -> list[Standing]:
        """Return the newest decision for each size that there has been."""
        return [
            Standing(1 << size, value, drafts, self.time(1 << size), self._num_trials[size])
            for size, (value, drafts) in sorted(self._decided.items())
        ]

    def hopeful(self, rows: int) -> float:
        """Return the same if drafts are cheaper than trials or costs have shown."""
        return min(self.time(rows), 1.0) / _MAY_BE_OFF

    def way(
        self,
        outlook: Outlook,
        hope: Callable[[], Outlook],
        *,
        has_prompts: bool,
        alone: bool = True,
    ) -> Way:
        """Decide whether a step drafts. No trial begins unless it is `alone`.

        `hope` returns the outlook with those drafts that are best at the `hopeful` factor. They are
        what a trial drafts where it is usual not to.
        """
        size, value = _size(outlook.rows), outlook.value(self.time(outlook.rows))
        _, drafted = self._decided.get(size, (1.0, True))
        self.drafts = usual = value > (self._bar.end if drafted else self._bar.begin)
        self._decided[size] = value, usual
        if not usual:  # text that is drafted for in vain may end
            self._accepted += (self._predicted - self._accepted) / _FORGOTTEN
        self._num_alike = self._num_alike + 1 if size == self._newest_size else 0
        self._newest_size = size
        if has_prompts:
            return Way(self._with_prompts(usual), None)
        share = _SHARE + (_FIRST_SHARE - _SHARE) / (1 + self._num_begun[size])
        self._credit_us += share * outlook.plain_us
        steady = self._num_alike >= _STEADY
        may_begin = self._trial is None and steady and alone
        if may_begin and self._credit_us >= self._least_us(outlook):
            self._begin(outlook if usual else hope(), usual)
        trial = self._trial
        if trial is None or trial.is_planned:
            return Way(usual, None)
        if trial.size != size:
            self._trial = None
            return Way(usual, None)
        return self._next(trial)

    @staticmethod
    def _least_us(outlook: Outlook) -> float:
        """Return what any trial costs."""
        return _LEAST_LOSS * outlook.plain_us * (_SETTLING + _STRETCH)

    def _begin(self, outlook: Outlook, usual: bool) -> None:
        """Begin a trial if it could change the decision and there is time for it."""
        time, size = self.time(outlook.rows), _size(outlook.rows)
        if usual and outlook.value(max(time, 1.0) * _MAY_BE_OFF) > self._bar.end:
            return
        going_on = outlook._replace(catch_up_us=0.0)
        if not usual and going_on.value(self.hopeful(outlook.rows)) < self._bar.begin:
            return
        loss = min(max(abs(outlook.value(time) - 1) / _LEAST_LOSS, 1), 1 / _LEAST_LOSS)
        cost_us = loss * self._least_us(outlook) + outlook.catch_up_us * (not usual)
        if self._credit_us >= cost_us:
            self._credit_us -= cost_us
            self._num_begun[size] += 1
            self._trial = Trial(size, drafts=not usual)

    def _with_prompts(self, usual: bool) -> bool:
        """Return whether a step with prompts drafts: as the steps around it do."""
        trial = self._trial
        if trial is None or trial.is_planned:
            return usual
        trial.num_waits += 1
        if trial.num_waits > _MOST_WAITS:
            self._trial = None
        return trial.drafts_in(trial.stretch)

    def _next(self, trial: Trial) -> Way:
        stretch = trial.stretch
        counts = trial.num_planned % (_SETTLING + _STRETCH) >= _SETTLING
        trial.num_planned += 1
        trial.num_open += 1
        return Way(trial.drafts_in(stretch), Mark(trial, stretch, counts))

    def took(self, mark: Mark, us: float, more: float, *, clean: bool) -> None:
        """Learn from a marked step: how long after the one before it its result came.

        `more` is the share that its drafts were predicted to add, 0 without any. Steps with drafts
        that would have been there in either way are not `clean`.
        """
        trial = mark.trial
        trial.num_open -= 1
        if mark.counts and clean:
            trial.times[mark.stretch].append(us)
            if more:
                trial.more.append(more)
        if trial is self._trial and trial.is_planned and not trial.num_open:
            self._trial = None
            self._conclude(trial)

    def _conclude(self, trial: Trial) -> None:
        result = trial.result()
        if result is None:
            return
        self._num_trials[trial.size] += 1
        self._all = self._all.add(*result)
        self._by_size[trial.size] = self._by_size[trial.size].add(*result)

    def accepted(self, predicted: float, accepted: int) -> None:
        """Learn from the drafts of a step how many of them were predicted to be accepted."""
        fade = 1 - min(predicted / _TOKENS_MEMORY, 1.0)
        self._predicted = fade * self._predicted + predicted
        self._accepted = fade * self._accepted + accepted


def _size(rows: int) -> int:
    """Return the class of batches of so many rows: up to 1, 2, 4, 8 .."""
    return (rows - 1).bit_length()


def _mean(times: list[float]) -> float:
    """Return the mean without the shortest and the longest."""
    cut = len(times) // _TRIMMED
    return float(np.mean(sorted(times)[cut : len(times) - cut]))
