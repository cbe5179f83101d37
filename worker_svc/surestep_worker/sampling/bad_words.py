"""bad_words: token sequences that the output must never complete."""

from __future__ import annotations

from typing import NamedTuple

import torch
from surestep_proto import engine_pb2 as pb

from .features import Rows


class _Words(NamedTuple):
    """The sequences of one request, split in front of their last token."""

    prefix: torch.Tensor  # i64[B,M] right-aligned
    prefix_len: torch.Tensor  # i64[B]
    last: torch.Tensor  # i64[B]


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
        words = [list(word.token_ids) for word in params.bad_words]
        assert all(words), "the gateway refuses empty bad words"
        width = max(len(word) for word in words) - 1
        self._words[slot] = _Words(
            torch.tensor([[0] * (width + 1 - len(word)) + word[:-1] for word in words]).long(),
            torch.tensor([len(word) - 1 for word in words]),
            torch.tensor([word[-1] for word in words]),
        )
        self._words[slot] = _Words(*(part.to(self._device) for part in self._words[slot]))
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
    width = words.prefix.shape[1]
    back = torch.arange(width, 0, -1, device=rows.length.device)  # tokens from the end
    tail = rows.tokens[rows.slot.unsqueeze(1), (rows.length.unsqueeze(1) - back).clamp(min=0)]
    ignored = back > words.prefix_len.unsqueeze(1)
    equal = ((tail.unsqueeze(1) == words.prefix) | ignored).all(dim=2)
    output_len = (rows.length - rows.prompt_len).unsqueeze(1)
    return equal & (words.prefix_len <= output_len)
