"""Inputs of a drafter that the host sends with a step."""

from __future__ import annotations

from typing import Generic, NamedTuple

from surestep_kernels.choose import DrawParams
from surestep_kernels.step_columns import Column


class DraftShape(NamedTuple):
    """Shape that decides which drafting kernels run: none when both numbers are 0."""

    num_drafts: int  # most of any row
    max_catch_up: int  # most positions that any row's drafter state has to catch up with
    random: bool  # some row draws its drafts
    truncated: bool  # and restricts what it draws from


class HeadInputs(NamedTuple, Generic[Column]):
    """Inputs of a draft head, for R rows that catch up with at most C positions together."""

    token_row: Column  # i32[C]
    cu_rows: Column  # i32[R+1]
    draw: DrawParams[Column]  # of each row
    factors: Column  # f32[R] divisors of the logits


class DraftInputs(NamedTuple, Generic[Column]):
    """Inputs of a drafter, for R rows."""

    slot: Column  # i32[R]
    max_drafts: Column  # i32[R] most drafts that the drafter may propose
    max_looked_up: Column  # i32[R] most drafts that are looked up
    catch_up: Column  # i32[R] most positions that the drafter's state has to catch up with
    head: HeadInputs[Column] | None
