"""What a drafter is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class Drafts(NamedTuple):
    """Proposed continuations. Columns of `ids` from `counts` on are unused and hold a real id."""

    ids: torch.Tensor  # i64[R,K]
    counts: torch.Tensor  # i64[R]


class Drafter(Protocol):
    """Guesses the next tokens of running requests. A wrong guess costs time, never a token."""

    def propose(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        k_caps: torch.Tensor,
    ) -> Drafts:
        """Draft for every VERIFY row of a step, at its start.

        Must be a function of its arguments and of committed state alone: every rank calls it and
        all must answer alike.

        Args:
            tokens: i32[S,W] token table.
            slots: i64[R].
            lengths: i64[R] known tokens: tokens[slot, :length]; what lies behind is stale.
            k_caps: i64[R] most drafts allowed; the answer's counts never exceed them.
        """
        ...
