"""State of a request: what it asked for, how far it is, and its stay in a slot."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from surestep_common.errors import SurestepError

from .prefix import PrefixChain
from .speculation import Experience

CANARY = "canary"  # id of a request of the scheduler's own that shows whether the workers live


class Finish(Enum):
    """Why a request ended well."""

    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for. Lengths in tokens."""

    id: str
    prompt_ids: list[int]
    emitted_ids: list[int]  # emitted before this scheduler saw the request
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0  # lower runs earlier
    cache_salt: str = ""
    draft_cap: int | None = None  # most drafts per step; None = no cap of its own
    want_prompt_logprobs: bool = False
    sampling: Any = None  # passed through to the workers


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of consecutive positions in parallel columns; `top_*` CSR by num_top."""

    token_id: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    num_top: list[int] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)

    def extend(self, other: Logprobs) -> None:
        """Append the positions of `other`."""
        for name in self.__slots__:
            getattr(self, name).extend(getattr(other, name))


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its tokens. It holds a tenancy while it runs and waits otherwise."""

    request: Request
    tokens: array[int]  # uint32; prompt and everything emitted
    max_len: int  # tokens never exceed this
    order: tuple[float, int]  # smaller runs first and is preempted last
    arrival: float  # seconds on the scheduler's clock
    chain: PrefixChain
    tenancy: Tenancy | None = None
    queue_s: float | None = None  # seconds from arrival to the first admission
    num_cached: int = 0  # tokens found in the prefix cache at the first admission
    prompt_logprobs: Logprobs | None = None  # collected until the first token
    experience: Experience = field(default_factory=Experience)  # of earlier tenancies
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_replays: int = 0
    may_draft: bool = True  # until its drafting meets logits that are not finite
    replayed_len: int = 0  # tokens at the newest replay
    num_non_finite: int = 0  # times its logits were not finite

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def is_replaying(self) -> bool:
        """It has emitted nothing since its newest replay."""
        return self.num_replays > 0 and len(self.tokens) == self.replayed_len

    @property
    def needs_prompt_logprobs(self) -> bool:
        """They are wanted and were not delivered: the whole prompt must be computed."""
        return self.request.want_prompt_logprobs and self.num_steps == 0


@dataclass(frozen=True, slots=True, eq=False)
class Tenancy:
    """One stay of a sequence in a slot; its numbers are the slot's line of the SlotTable."""

    seq: Sequence
    slot: int
    slot_epoch: int
    num_cached: int  # tokens whose KV was there at admission
    draft_valid: int  # tokens whose drafter rows were there too
    snapshot_id: int  # recurrent state after num_cached tokens; 0 = none
    blocks: list[int]  # grows
    stop_ids: frozenset[int]  # of the request


@dataclass(slots=True)
class Output:
    """What one applied result means for one request."""

    seq: Sequence
    token_ids: array[int]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # with the first tokens only
    finish: Finish | None = None
    error: SurestepError | None = None
