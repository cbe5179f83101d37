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

from collections.abc import Iterable
from typing import Any, cast
from zlib import crc32

import torch
from surestep_kernels.kernel_set import REFERENCE
from surestep_worker.drafters import DRAFTERS, DraftContext, Drafts
from surestep_worker.drafters.config import SpeculativeConfig

_ABSENT = cast(Any, None)
NO_CONTEXT = DraftContext(  # for drafters that look at tokens only
    _ABSENT, _ABSENT, _ABSENT, _ABSENT, _ABSENT, REFERENCE, torch.device("cpu"), 0
)


CHARACTERS = ("oracle", "garbage", *(f"flip-{j}" for j in range(5)), "eos-mid", "none", "ragged")


class Truth:
    """The full token ids of every request of a test. None may begin with the prompt of another."""

    def __init__(self) -> None:
        self.vocab_size = 2
        self.stop_id = 0
        self._after: dict[tuple[int, ...], list[int]] = {}

    def learn(self, requests: Iterable[list[int]], *, vocab_size: int, stop_id: int) -> None:
        """Replace everything known by `requests`, each prompt and output as one list."""
        self.vocab_size, self.stop_id = vocab_size, stop_id
        self._after = {
            tuple(ids[:length]): ids[length:] for ids in requests for length in range(1, len(ids))
        }

    def continuation(self, known: list[int]) -> list[int]:
        """What follows `known`; nothing if no request begins like that."""
        return self._after.get(tuple(known), [])


TRUTH = Truth()


class _PerRow:
    """A drafter that looks at one row at a time."""

    def __init__(self, config: SpeculativeConfig, context: DraftContext) -> None:
        self.num_drafts = config.num_speculative_tokens

    def draft(self, known: list[int], cap: int) -> list[int]:
        """Drafts after `known`; the caller cuts them to `cap`."""
        raise NotImplementedError

    def propose(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        max_drafts: torch.Tensor,
    ) -> Drafts:
        """See Drafter."""
        ids = torch.zeros(len(slots), self.num_drafts, dtype=torch.int64)
        counts = torch.zeros_like(slots)
        for r, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            cap = min(self.num_drafts, int(max_drafts[r]))
            found = self.draft(tokens[slot, :length].tolist(), cap)[:cap]
            ids[r, : len(found)] = torch.tensor(found, dtype=torch.int64)
            counts[r] = len(found)
        return Drafts(ids, counts)


def _hash(*numbers: int) -> int:
    return crc32(repr(numbers).encode())


@DRAFTERS.register("oracle")
class Oracle(_PerRow):
    def draft(self, known: list[int], cap: int) -> list[int]:
        return TRUTH.continuation(known)


@DRAFTERS.register("garbage")
class Garbage(_PerRow):
    def draft(self, known: list[int], cap: int) -> list[int]:
        return [_hash(*known[-3:], len(known), i) % TRUTH.vocab_size for i in range(cap)]


class Flip(_PerRow):
    """The oracle, wrong at position `at`, right again behind it."""

    def __init__(self, config: SpeculativeConfig, context: DraftContext, at: int) -> None:
        super().__init__(config, context)
        self._at = at

    def draft(self, known: list[int], cap: int) -> list[int]:
        right = TRUTH.continuation(known)
        return [(x + (i == self._at)) % TRUTH.vocab_size for i, x in enumerate(right)]


for _at in range(5):
    DRAFTERS.register(f"flip-{_at}")(lambda config, context, at=_at: Flip(config, context, at))


@DRAFTERS.register("eos-mid")
class EosMid(_PerRow):
    def draft(self, known: list[int], cap: int) -> list[int]:
        right = TRUTH.continuation(known)[:cap]
        return [TRUTH.stop_id if i == len(right) // 2 else x for i, x in enumerate(right)]


@DRAFTERS.register("none")
class Nothing(_PerRow):
    def draft(self, known: list[int], cap: int) -> list[int]:
        return []


@DRAFTERS.register("ragged")
class Ragged(_PerRow):
    def draft(self, known: list[int], cap: int) -> list[int]:
        return TRUTH.continuation(known)[: _hash(len(known), *known[-2:]) % (cap + 1)]
