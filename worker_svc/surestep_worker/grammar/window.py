"""The window of a row with a grammar: what it drafts, and what may be chosen at each place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from surestep_common.errors import InvalidRequest

from .walk import Walk, Words, allows

_DRAFTING_S = 0.005  # of processor time, spent on the drafts of a row: no more are added then


class Ask(NamedTuple):
    """Inputs of a request's next window."""

    emitted: Sequence[int]  # tokens that its grammar has not seen
    drafts: Sequence[int]
    most: int | None = None  # drafts of the window; None: they are settled, and masked as they are


@dataclass(slots=True)
class Window:
    """Window that a row is to verify, and its masks.

    Positions in front of `first` and those behind the masks have none: any token may come there,
    or they are never reached.
    """

    drafts: list[int] = field(default_factory=list)
    num_forced: int = 0  # of them
    first: int = 0
    masks: list[Words] = field(default_factory=list)
    fault: str = ""  # of the grammar: no token can be chosen


def make_window(walk: Walk, proposed: Sequence[int], most: int, num_words: int) -> Window:
    """Return a window of at most so many drafts from a walk, which stays where it is.

    What the grammar forces is drafted instead of what is `proposed`, and behind it. The first draft
    that the grammar bars ends the window: it is not what will be chosen there.
    """
    window, deadline = Window(), time.thread_time() + _DRAFTING_S
    pending = list[int]()  # forced tokens
    while True:
        place = len(window.drafts)
        words = _add_mask(walk, window, place, num_words)
        if window.fault or place == most or time.thread_time() > deadline:
            return window
        pending = pending or walk.forced()
        if pending:
            token = pending[0]
        elif place < len(proposed) and list(proposed[:place]) == window.drafts:
            token = proposed[place]
        else:
            return window
        if words is not None and not allows(words, token):
            return window
        window.drafts.append(token)
        window.num_forced += bool(pending)
        pending = pending[1:]
        if walk.stops(token):
            return window
        walk = walk if place else walk.copy()
        walk.advance(token)


def mask_window(walk: Walk, drafts: Sequence[int], num_words: int) -> Window:
    """Return the masks of a window whose drafts are settled, from a walk that stays where it is."""
    window = Window()
    for place, token in enumerate((*drafts, None)):
        words = _add_mask(walk, window, place, num_words)
        barred = words is not None and token is not None and not allows(words, token)
        if token is None or window.fault or barred or walk.stops(token):
            break
        window.drafts.append(token)
        walk = walk if place else walk.copy()
        walk.advance(token)
    return window


def _add_mask(walk: Walk, window: Window, place: int, num_words: int) -> Words | None:
    """Add the mask of a position; None if it has none.

    A grammar that exceeds a limit there allows nothing, and is at fault if that is the first one.
    """
    if not walk.has_mask and not window.masks:
        window.first = place + 1
        return None
    words = np.zeros(num_words, dtype=np.int32)
    try:
        walk.fill(words)
    except InvalidRequest as error:
        words[:] = 0
        window.fault = error.message
    window.masks.append(words)
    return words
