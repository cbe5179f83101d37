"""Rotary position embedding (Su et al., 2021), in the "neox" form: halves, not pairs."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

Sections = tuple[int, int, int]  # how many of D'/2 frequencies turn with time, height and width


class Rotary(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        sections: Sections | None = None,
    ) -> None: ...


def rotary_reference(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, sections: Sections | None = None
) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by their positions i64[T].

    cos_sin is f32[P, D']: row p holds the D'/2 cosines of position p, then its D'/2 sines. Of each
    head the first D' elements are rotated, the rest stays as it is.

    With `sections` positions are i64[3, T], of time, height and width, and each frequency turns
    with one of them, in the interleaved form of Qwen3-VL and Qwen3.5 (see section_axes). A text
    token has the same position three times, which gives the same result as without sections.
    """
    if sections is None:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D'/2] each
    else:
        by_axis = cos_sin[positions].unflatten(2, (2, -1))  # [3, T, 2, D'/2]
        axes = section_axes(sections).to(positions.device)
        turned = by_axis.gather(0, axes.expand(1, *by_axis.shape[1:]))
        cos, sin = turned.squeeze(0).unsqueeze(2).unbind(1)
    for x in (q[..., : cos_sin.shape[1]], k[..., : cos_sin.shape[1]]):
        first, second = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def section_axes(sections: Sections) -> Tensor:
    """Return which of the three positions each frequency turns with: i64[D'/2].

    The axes alternate, time, height, width, until a section is used up; time gets all the rest.
    """
    index = torch.arange(sum(sections))
    axes = index % 3
    return torch.where(index // 3 < torch.tensor(sections)[axes], axes, 0)
