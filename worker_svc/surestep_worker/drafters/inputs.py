"""What the host sends a drafter with a step."""

from __future__ import annotations

from typing import NamedTuple

from surestep_kernels.step.choose import DrawParams
from torch import Tensor


class DraftShape(NamedTuple):
    """What decides which kernels draft. None of them runs when both numbers are 0."""

    num_drafts: int  # most of any row
    max_catch_up: int  # most positions of any row by which the drafter's state follows
    random: bool  # some row draws its drafts
    truncated: bool  # and restricts what it draws from


class HeadInputs(NamedTuple):
    """What the host sends for R rows that catch up with at most C positions together."""

    token_row: Tensor  # i32[C]
    cu_rows: Tensor  # i32[R+1]
    draw: DrawParams  # of each row
    factors: Tensor  # f32[R] divisors of the logits


class DraftInputs(NamedTuple):
    """What the host sends a drafter for R rows."""

    slot: Tensor  # i32[R]
    max_drafts: Tensor  # i32[R] most drafts
    catch_up: Tensor  # i32[R] positions that the drafter's state follows by, at most
    head: HeadInputs | None
