"""Whole numbers of 1 to 8 bits, packed into words of 32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .format import slice_of

_BITS = 32  # of a word


class Packing(NamedTuple):
    """Places of numbers along a dimension: one behind the other, the lowest bits first.

    Where their bits do not divide a word, 32 of them fill as many words as a number has bits; in
    `planes`, as GPTQModel parts them, those words hold parts of 4, 2 and 1 bits of every number,
    the lowest part first.
    """

    bits: int
    planes: bool = False

    @property
    def numbers(self) -> int:
        """Count of numbers that fill whole words."""
        return _BITS if _BITS % self.bits else _BITS // self.bits

    def words(self, numbers: int) -> int:
        """Return how many words that many numbers take."""
        return -(-numbers * self.bits // _BITS)

    def slice_of(self, part: range) -> slice:
        """Return the words that hold a part of the numbers."""
        units, each = slice_of(part, self.numbers), self.words(self.numbers)
        stop = units.stop * each if self._is_parted else self.words(part.stop)
        return slice(units.start * each, stop)

    def unpack(self, words: Tensor, part: range) -> Tensor:
        """Return a part of the numbers, u8[R, n], of the words i32[R, W] of `slice_of`."""
        count, each = self.numbers, self.words(self.numbers)
        units = functional.pad(words, (0, -words.shape[1] % each)).unflatten(1, (-1, each))
        numbers = self._join(units) if self._is_parted else _in_a_row(units, self.bits, count)
        first = part.start % count
        return numbers.flatten(1)[:, first : first + len(part)]

    @property
    def _is_parted(self) -> bool:
        return self.planes and self.numbers == _BITS

    def _join(self, units: Tensor) -> Tensor:
        """Return the numbers u8[R, U, 32] of units i32[R, U, bits]."""
        numbers, offset = torch.zeros((*units.shape[:2], _BITS), dtype=torch.uint8), 0
        for width in (8, 4, 2, 1):
            if self.bits & width:
                plane = units[..., offset : offset + width, None]
                part = _in_a_row(plane, width, _BITS // width).flatten(2)
                numbers |= part << offset
                offset += width
        return numbers


def _in_a_row(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` numbers u8[..., count] of words i32[..., W]."""
    numbers = []
    for first in range(0, count * bits, bits):
        word, shift = divmod(first, _BITS)
        low = min(bits, _BITS - shift)
        number = words[..., word] >> shift & (1 << low) - 1
        if low < bits:
            number = number | (words[..., word + 1] & (1 << bits - low) - 1) << low
        numbers.append(number.to(torch.uint8))
    return torch.stack(numbers, dim=-1)


def unpack_nibbles(words: Tensor, places: Sequence[int]) -> Tensor:
    """Return numbers u8[R, 8 W] of words i32[R, W], each of which holds eight at these places."""
    numbers = [(words >> 4 * place & 0xF).to(torch.uint8) for place in places]
    return torch.stack(numbers, dim=-1).flatten(1)
