"""bad_words: token sequences that the output must never complete."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from surestep_proto import engine_pb2 as pb

from .features import Rows


class _Words(NamedTuple):
    """The B sequences of one request: what stands in front of their last tokens, F ids in all."""

    ids: torch.Tensor  # i64[F]
    back: torch.Tensor  # i64[F] tokens from the end of the history at which each has to stand
    cu: torch.Tensor  # i64[B+1] those of sequence b are ids[cu[b]:cu[b+1]]
    last: torch.Tensor  # i64[B]

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> _Words:
        """Of sequences that are not empty."""
        counts = [len(word) - 1 for word in words]
        return cls(
            ids=torch.tensor([token for word in words for token in word[:-1]]).long(),
            back=torch.tensor([back for n in counts for back in range(n, 0, -1)]).long(),
            cu=torch.tensor([0, *accumulate(counts)]),
            last=torch.tensor([word[-1] for word in words]),
        )


class BadWords:
    """Masks the last token of a sequence whose other tokens end the output so far.

    Tokens of the prompt do not take part, as in vLLM.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.active = torch.zeros(num_slots, dtype=torch.bool)
        self._device = device
        self._words: dict[int, _Words] = {}

    def admit(self, slot: int, params: pb.SamplingParams) -> None:
        if not params.bad_words:
            return
        words = _Words.of([word.token_ids[:] for word in params.bad_words])
        self._words[slot] = _Words(*(part.to(self._device) for part in words))
        self.active[slot] = True

    def free(self, slot: int) -> None:
        self._words.pop(slot, None)
        self.active[slot] = False

    def apply(self, z: torch.Tensor, rows: Rows) -> None:
        for slot in set(rows.slot.tolist()):
            mine = (rows.slot == slot).nonzero().squeeze(1)
            row, word = _completable(self._words[slot], rows.pick(mine)).nonzero(as_tuple=True)
            z[mine[row], self._words[slot].last[word]] = float("-inf")


def _completable(words: _Words, rows: Rows) -> torch.Tensor:
    """Which sequences lack only their last token -> bool[N,B]. All rows are of one slot."""
    place = rows.length.unsqueeze(1) - words.back
    stands = rows.tokens[rows.slot.unsqueeze(1), place.clamp(min=0)] == words.ids
    stands &= place >= rows.prompt_len.unsqueeze(1)
    before = torch.nn.functional.pad(stands.cumsum(dim=1), (1, 0))
    begin, end = words.cu[:-1], words.cu[1:]
    return before[:, end] - before[:, begin] == end - begin
