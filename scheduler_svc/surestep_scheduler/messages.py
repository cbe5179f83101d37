"""One step as the core sees it: the plan it made and the outcome it applies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .sequence import Logprobs, Tenancy


class Freed(NamedTuple):
    """A tenancy that ends."""

    slot: int
    slot_epoch: int


class Extend(NamedTuple):
    """Blocks appended to the block table of a slot."""

    slot: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Row columns are parallel; see StepPlan in engine.proto for their meaning."""

    epoch: int
    step: int
    freed: list[Freed]
    admissions: list[Tenancy]
    extends: list[Extend]
    rows: list[Tenancy]
    slot: list[int]
    slot_epoch: list[int]
    mode: list[int]
    num_tokens: list[int]
    len_lo: list[int]
    len_hi: list[int]
    k_cap: list[int]
    accepted_step: list[int]
    accepted: list[int]
    depends_on_step: list[int]
    width: list[int]  # tokens each row schedules: num_tokens, or k_cap + 1

    @property
    def num_step_tokens(self) -> int:
        """Input rows of the step, drafts included."""
        return sum(self.width)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the ranks report for one step. Row columns are parallel and in the plan's order."""

    epoch: int
    step: int
    digests: list[int]  # one per rank
    slot: list[int]
    slot_epoch: list[int]
    ok: list[bool]
    len_before: list[int]
    n_drafts: list[int]
    n_accepted: list[int]
    n_emitted: list[int]
    token_ids: list[int]  # CSR by n_emitted
    logprobs: dict[int, Logprobs]  # by row
    prompt_logprobs: dict[int, Logprobs]  # by row
