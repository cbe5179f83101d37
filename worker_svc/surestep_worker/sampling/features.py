"""What a sampling feature is: an object that owns its arrays and changes the rows that use it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from surestep_proto import engine_pb2 as pb


class Rows(NamedTuple):
    """The positions to sample. Row n chooses the token at index `length[n]` of its slot."""

    slot: torch.Tensor  # i64[N]
    length: (
        torch.Tensor
    )  # i64[N] history: tokens[slot, :length], earlier drafts of a window included
    prompt_len: torch.Tensor  # i64[N] leading tokens that are prompt
    tokens: torch.Tensor  # i32[S,W] token table, shared by all rows

    def pick(self, index: torch.Tensor) -> Rows:
        """The rows at `index` (i64[M] or bool[N])."""
        return Rows(self.slot[index], self.length[index], self.prompt_len[index], self.tokens)


class Feature(Protocol):
    """One parameter, or a family of them, that changes logits."""

    active: torch.Tensor  # bool[S] slots whose rows `apply` must see

    def admit(self, slot: int, params: pb.SamplingParams) -> None:
        """Take over the parameters of a new tenant of `slot`."""

    def free(self, slot: int) -> None:
        """Forget the tenant of `slot`."""

    def apply(self, z: torch.Tensor, rows: Rows) -> None:
        """Change the logits z f32[N,V] of `rows`, all active, in place.

        They are finite or -inf before, SATURATED at most afterwards: see surestep_kernels.choose.
        """


def apply_feature(feature: Feature, z: torch.Tensor, rows: Rows) -> None:
    """Apply `feature` to those rows of z that it is active in."""
    hit = feature.active[rows.slot]
    if hit.all():
        feature.apply(z, rows)
    elif hit.any():
        part = z[hit]
        feature.apply(part, rows.pick(hit))
        z[hit] = part
