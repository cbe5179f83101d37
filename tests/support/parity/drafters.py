"""Drafters with a known character, for tests. Importing this module registers them.

    oracle      the target's own continuation: everything is accepted
    garbage     ids by hash: next to nothing is
    flip-0..4   the oracle, wrong at one position
    eos-mid     the oracle, with a stop id in the middle of the window
    none        no drafts, whatever is allowed
    ragged      the oracle, with another number of drafts in every row and step

They know what is right from TRUTH, which the test fills with what the engine said without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from surestep_kernels.table import REFERENCE
from surestep_scheduler.core.state import SchedulerState
from surestep_scheduler.speculation.speculation import Alarm
from surestep_worker.drafters import DRAFTERS, DraftContext, Drafts
from surestep_worker.drafters.config import SpeculativeConfig
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_ABSENT = cast(Any, None)
NO_CONTEXT = DraftContext(  # for drafters that look at tokens only
    _ABSENT, _ABSENT, 0, _ABSENT, _ABSENT, REFERENCE, torch.device("cpu"), 0, reads_freely=True
)


def draft_again(state: SchedulerState) -> None:
    """No pause after a fault, so that there are many."""
    state.speculation.alarm = Alarm()


class Truth:
    """The full token ids of every request of a test. None may begin with the prompt of another."""

    def __init__(self) -> None:
        self.learn([], vocab_size=2, stop_id=0)

    def learn(self, requests: Iterable[list[int]], *, vocab_size: int, stop_id: int) -> None:
        """Replace everything known by `requests`, each prompt and output as one list."""
        self.vocab_size, self.stop_id = vocab_size, stop_id
        known = [torch.tensor(ids) for ids in requests] or [torch.zeros(0, dtype=torch.int64)]
        self._ids = pad_sequence(known, batch_first=True)
        self._lengths = torch.tensor([len(ids) for ids in known])
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def continuation(self, known: Tensor, lengths: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """What follows the first `lengths` of the tokens `known` [R, N]: ids [R, most], and how many.

        Nothing if no request begins like that. It all stays on the device, so that it is captured.
        """
        device = known.device
        if device not in self._on:  # before anything is captured, by the warm-up
            self._on[device] = self._ids.to(device), self._lengths.to(device)
        ids, ends = self._on[device]
        width = min(known.shape[1], ids.shape[1])
        behind = torch.arange(width, device=device) >= lengths[:, None]
        same = (known[:, None, :width] == ids[None, :, :width]) | behind[:, None]
        begins = same.all(dim=2) & (lengths[:, None] <= ends) & (lengths[:, None] > 0)
        which = begins.int().argmax(dim=1)
        at = lengths[:, None] + torch.arange(most, device=device)
        found = ids[which[:, None], at.clamp(0, max(ids.shape[1] - 1, 0))]
        left = (ends[which] - lengths).clamp(0, most)
        return found, torch.where(begins.any(dim=1), left, 0)


TRUTH = Truth()


class Right(NamedTuple):
    """What is right after rows [R], and what a character draws its whims from."""

    ids: Tensor  # i64[R, K]
    counts: Tensor  # i64[R] of them, at most `caps`
    caps: Tensor  # i64[R]
    seed: Tensor  # i64[R] another one in every step

    @property
    def place(self) -> Tensor:
        return torch.arange(self.ids.shape[1], device=self.ids.device)

    def drawn(self, below: Tensor | int, place: Tensor | int = 0) -> Tensor:
        mixed = (self.seed if isinstance(place, int) else self.seed[:, None]) * 48271 + place * 7919
        return (mixed ^ (mixed >> 5)) % below


def _oracle(right: Right) -> Drafts:
    return Drafts(right.ids, right.counts)


def _garbage(right: Right) -> Drafts:
    return Drafts(right.drawn(TRUTH.vocab_size, right.place), right.caps)


def _flip(right: Right, at: int) -> Drafts:
    return Drafts((right.ids + (right.place == at)) % TRUTH.vocab_size, right.counts)


def _eos_mid(right: Right) -> Drafts:
    is_middle = right.place == (right.counts // 2)[:, None]
    return Drafts(right.ids.masked_fill(is_middle, TRUTH.stop_id), right.counts)


def _none(right: Right) -> Drafts:
    return Drafts(right.ids, torch.zeros_like(right.counts))


def _ragged(right: Right) -> Drafts:
    return Drafts(right.ids, torch.minimum(right.counts, right.drawn(right.caps + 1)))


_CHANGES: dict[str, Callable[[Right], Drafts]] = {
    "oracle": _oracle,
    "garbage": _garbage,
    **{f"flip-{at}": partial(_flip, at=at) for at in range(5)},
    "eos-mid": _eos_mid,
    "none": _none,
    "ragged": _ragged,
}
CHARACTERS = tuple(_CHANGES)


class _Character:
    """A drafter that changes what is right, on whatever device that is."""

    def __init__(self, change: Callable[[Right], Drafts], most: int) -> None:
        self._change, self._most = change, most

    def propose(self, tokens: Tensor, slots: Tensor, lengths: Tensor, max_drafts: Tensor) -> Drafts:
        """See Drafter."""
        known, caps = tokens[slots].long(), max_drafts.clamp(max=self._most)
        ids, counts = TRUTH.continuation(known, lengths, self._most)
        newest = known.gather(1, (lengths - 1).clamp(0, known.shape[1] - 1)[:, None])[:, 0]
        seed = lengths * 31 + newest
        return self._change(Right(ids, torch.minimum(counts, caps), caps, seed))


def _register(name: str) -> None:
    def make(config: SpeculativeConfig, context: DraftContext) -> _Character:
        return _Character(_CHANGES[name], config.num_speculative_tokens)

    DRAFTERS.register(name)(make)


for _name in CHARACTERS:
    _register(_name)
