"""State of a request: what it asked for, how far it is, and its stay in a slot."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from surestep_common.errors import InvalidRequest, SurestepError, UnsupportedParameter
from surestep_common.invariants import LABEL_LOGITS, MEAN
from surestep_common.request_params import check_vocab
from surestep_common.tenants import cache_root, told_salt

from surestep_scheduler.cache.blocks import BlockTable
from surestep_scheduler.cache.log import Source
from surestep_scheduler.cache.prefix import PrefixChain
from surestep_scheduler.speculation.estimates import THE_MODEL, AcceptanceStats, Writer

from .limits import Limits

if TYPE_CHECKING:
    from .queue import ActiveTenant

_PROMPT_LOGPROBS = 1 << 16  # of one request that a step may compute
_PARTS = 3  # of what a step would take of a prompt, in the other shape


class Finish(Enum):
    """Why a request ended well."""

    STOP = 1
    LENGTH = 2
    POOLED = 3
    ABORTED = 4  # by an operator


class Adapter(NamedTuple):
    """An adapter in the pools of all ranks."""

    name: str
    place: int
    digest: str  # of what it computes


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request of a client. Lengths in tokens."""

    id: str
    prompt_ids: Seq[int]
    emitted_ids: Seq[int]  # emitted before this scheduler saw the request
    max_tokens: int  # a vector counts as one
    pooling: int = 0  # how a vector is made of the prompt; 0 = tokens are wanted
    label_ids: tuple[int, ...] = ()  # tokens whose logits are the vector
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0  # lower runs earlier
    cache_owner: str = ""  # only its own requests find its prefixes
    cache_salt: str = ""
    adapter: Adapter | None = None  # None: the model itself answers
    draft_cap: int | None = None  # most drafts per step; None = no cap of its own
    has_grammar: bool = False  # that restricts its tokens
    want_logprobs: bool = False
    want_prompt_logprobs: bool = False
    want_drafted: bool = False  # chunks say which tokens were drafts
    num_top_prompt_logprobs: int = 0
    tenant: str = ""  # all requests of one tenant share what it may have
    weight: float = 1.0  # of the tenant
    sampling: Any = None  # passed through to the workers
    passed_bytes: int = 0  # that this and the labels take on the wire
    wire_ids: Any = ()  # prompt_ids and emitted_ids as they came, passed through too

    @property
    def needs_head(self) -> bool:
        """Return whether it takes the output head of the model."""
        return self.pooling in (0, LABEL_LOGITS)

    @property
    def text_group(self) -> int:
        """Return a number of all who may find its prefixes, 0 of a request that writes no text."""
        return 0 if self.pooling else int.from_bytes(self.cache_root[:8], "little")

    @property
    def cache_root(self) -> bytes:
        """Return what the keys of its prefixes begin with: an adapter has caches of its own."""
        adapter = "" if self.adapter is None else self.adapter.digest
        return cache_root(self.cache_owner, self.cache_salt, adapter)

    @property
    def writer(self) -> Writer:
        """Return whose text it wants."""
        adapter = self.adapter
        return THE_MODEL if adapter is None else Writer(1 + adapter.place, adapter.digest)

    def chain(self, limits: Limits) -> PrefixChain:
        """Return the keys of its prefixes, of which none is computed yet."""
        name, number = ("", None) if (one := self.adapter) is None else (one.name, 1 + one.place)
        return PrefixChain(
            self.cache_root,
            limits.block_size,
            limits.shared_len(len(self.prompt_ids)),
            names_next=limits.drafter_has_state,
            source=Source(
                told_salt(self.cache_owner, self.cache_salt), name, number, limits.kv_windows
            ),
        )


class RequestShape(NamedTuple):
    """Shape of a request's computation, as far as that is free."""

    draft_cap: int  # most drafts per row that the drafter proposes
    forced_cap: int  # most drafts per row; 0 without a grammar
    max_chunk: int  # tokens of its prompt that one step may take


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of consecutive positions in parallel columns; `top_*` CSR by num_top."""

    token_id: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    num_top: list[int] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)

    def extend(self, other: TokenLogprobs) -> None:
        """Append the positions of `other`."""
        for name in self.__slots__:
            getattr(self, name).extend(getattr(other, name))


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its tokens. It holds a tenancy while it runs and waits otherwise."""

    request: Request
    tenant: ActiveTenant = field(init=False)  # once it is open
    tokens: array[int]  # uint32; prompt and everything emitted
    max_len: int  # tokens never exceed this
    order: tuple[float, int]  # smaller runs first and is preempted last
    arrival: float  # seconds on the scheduler's clock
    shared_len: int  # see Limits.shared_len
    chain: PrefixChain
    tenancy: Tenancy | None = None
    queue_s: float | None = None  # seconds from arrival to the first admission
    num_cached: int = 0  # tokens found in the prefix cache at the first admission
    prompt_logprobs: TokenLogprobs | None = None  # collected until the first token
    # Of earlier tenancies.
    acceptance_stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_displaced: int = 0  # of them, those for another tenant's sake
    computed_len: int = 0  # tokens that were planned in earlier tenancies
    num_replays: int = 0
    may_draft: bool = True  # until its drafting meets logits that are not finite
    replayed_len: int = 0  # tokens at the newest replay
    num_non_finite: int = 0  # times its logits were not finite

    @classmethod
    def of(cls, request: Request, limits: Limits, number: int, now: float) -> Self:
        """Make the `number`-th sequence. Raises InvalidRequest or RequestTooLarge."""
        prompt_len, emitted = len(request.prompt_ids), request.emitted_ids
        if not prompt_len:
            raise InvalidRequest("the prompt is empty", param="prompt_ids")
        if limits.headless and request.needs_head:
            raise InvalidRequest("the model has no output head: it writes no text", param="pooling")
        if request.has_grammar and limits.grammar_fault:
            raise UnsupportedParameter(limits.grammar_fault, param="grammar")
        limits.check_len(prompt_len + len(emitted), request.pooling)
        if request.max_tokens <= len(emitted):
            raise InvalidRequest("no tokens are left to emit", param="max_tokens")
        max_len = min(prompt_len + request.max_tokens, limits.longest(request.pooling))
        limits.check_bytes(max_len, request.passed_bytes)
        tokens = array("I")
        tokens.extend(request.prompt_ids)
        tokens.extend(emitted)
        check_vocab("prompt_ids", tokens, limits.vocab_size)
        return cls(
            request=request,
            tokens=tokens,
            max_len=max_len,
            order=(now + request.priority * limits.priority_aging_s, number),
            arrival=now,
            shared_len=limits.shared_len(prompt_len),
            chain=request.chain(limits),
        )

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def goes_on(self) -> bool:
        """Return whether it was in a slot before, here or elsewhere: a reader has a part of it."""
        return self.computed_len > 0 or bool(self.request.emitted_ids)

    @property
    def is_replaying(self) -> bool:
        """Return whether it has emitted nothing since its newest replay."""
        return self.num_replays > 0 and len(self.tokens) == self.replayed_len

    def shape(self, limits: Limits, *, usual: bool) -> RequestShape:
        """Choose how it is computed: not as usual when that may be what has ended the workers."""
        chunk, least = limits.max_num_batched_tokens, limits.prompt_chunk
        if self.needs_prompt_logprobs:
            positions = _PROMPT_LOGPROBS // (1 + self.request.num_top_prompt_logprobs)
            chunk = max(least, min(chunk, positions))
        if not usual:
            part = min(chunk, len(self.tokens)) // _PARTS
            return RequestShape(draft_cap=0, forced_cap=0, max_chunk=max(least, part))
        may_draft = self.may_draft and not self.request.pooling
        drafts = limits.draft_cap(self.request.draft_cap) if may_draft else 0
        forced = limits.forced_cap(self.request.draft_cap) if self.request.has_grammar else 0
        return RequestShape(drafts, forced, chunk)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Return whether they are still to be delivered: the whole prompt must be computed."""
        return self.request.want_prompt_logprobs and self.num_steps == 0

    @property
    def needs_whole_prompt(self) -> bool:
        """Return whether no part of the prompt may come from the prefix cache."""
        return self.needs_prompt_logprobs or self.request.pooling == MEAN


@dataclass(frozen=True, slots=True, eq=False)
class Tenancy:
    """Stay of a sequence in a slot; its numbers are the slot's line of the SlotTable."""

    seq: Sequence
    slot: int
    slot_epoch: int
    num_cached: int  # tokens whose KV was there at admission
    drafter_len: int  # tokens whose drafter rows were there too
    snapshot_id: int  # recurrent state after num_cached tokens; 0 = none
    tables: list[BlockTable]  # by KV group
    stop_ids: frozenset[int]  # of the request
    max_chunk: int  # tokens of its prompt that one step may take
    text_group: int  # of requests that may draft from its answer; 0 = none

    @property
    def adapter(self) -> int:
        """Return the place of its adapter, plus 1; 0 = none."""
        return self.seq.request.writer.number

    @property
    def blocks(self) -> list[int]:
        """Blocks that it holds, in all KV groups."""
        return [block for table in self.tables for block in table.blocks]


@dataclass(slots=True)
class Output:
    """Output of an applied result for a request."""

    seq: Sequence
    token_ids: array[int]
    num_drafted: int = 0  # of the tokens, from the first: accepted drafts
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None  # with the first tokens only
    pooled: bytes = b""  # the prompt's vector, of a request that wants one
    finish: Finish | None = None
    error: SurestepError | None = None
