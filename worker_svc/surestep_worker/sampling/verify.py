"""Accept iff equal: a draft is accepted when it is the token that the target chose anyway.

Row i of a window chose its token after `committed + drafts[:i]`, so its choice stands only if every
draft before it equals the choice before it. Drafts decide how many tokens a step yields, never
which.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from surestep_proto import engine_pb2 as pb

from .sampler import Sampled
from .stops import StopTokens


class Verdict(NamedTuple):
    """What each window emits. Columns of `tokens` from `n_emitted` on are meaningless."""

    tokens: torch.Tensor  # i64[R,K+1] emitted ids, leading part
    n_accepted: (
        torch.Tensor
    )  # i64[R] n_emitted - 1, or n_emitted if a drafted stop id ended the window
    n_emitted: torch.Tensor  # i64[R] 0 only if the status is not OK
    status: torch.Tensor  # u8[R] pb.RowStatus of the first position


def verify(
    sampled: Sampled,
    cu_rows: torch.Tensor,
    drafts: torch.Tensor,
    n_drafts: torch.Tensor,
    slot: torch.Tensor,
    stops: StopTokens,
) -> Verdict:
    """Decide what every window emits.

    A window ends with the first of: a choice that differs from its draft, a stop id, the last row,
    or a bad row (which is not emitted; if it is the first, the window emits nothing and says why).

    Args:
        sampled: choices of the N flat rows.
        cu_rows: i64[R+1]; window r owns rows cu_rows[r]:cu_rows[r+1], which are n_drafts[r] + 1.
        drafts: i64[R,K]; only the first n_drafts[r] of a row mean anything.
        n_drafts: i64[R]; 0 for a plain decode row.
        slot: i64[R].
        stops: the stop ids of every slot.
    """
    position = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    inside = position <= n_drafts.unsqueeze(1)
    index = torch.where(inside, cu_rows[:-1].unsqueeze(1) + position, 0)
    tokens, status = sampled.ids[index], sampled.status[index]

    equal = (tokens[:, :-1] == drafts) & inside[:, 1:]
    stop = stops.contains(slot, tokens)
    emitted = inside & (status == pb.OK)
    emitted[:, 1:] &= equal & ~stop[:, :-1]
    n_emitted = emitted.long().cumprod(dim=1).sum(dim=1)

    last = (n_emitted - 1).clamp(min=0).unsqueeze(1)
    drafted = torch.nn.functional.pad(equal, (0, 1))  # the row behind the last draft has no draft
    drafted_stop = (drafted & stop).gather(1, last).squeeze(1) & (n_emitted > 0)
    return Verdict(tokens, last.squeeze(1) + drafted_stop, n_emitted, status[:, 0])
