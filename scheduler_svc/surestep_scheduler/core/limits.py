"""Limits of the policy: the workers' sizes and the operator's settings, as of an epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from surestep_common.errors import InvalidRequest, RequestTooLarge
from surestep_common.kv_groups import ALL, KVGroups
from surestep_common.request_params import MAX_PLAN_BYTES, ROWS_BYTES, admission_bytes

from surestep_scheduler.speculation.draft_length import StepCosts

_ALL = 1 << 62  # tokens: more than any request has
_GROUP_BYTES = 32  # of a plan, for what is said of an admission in each further KV group


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes in tokens unless the name says otherwise."""

    num_slots: int  # requests that can run at once
    num_blocks: int  # NULL block 0 included
    block_size: int
    kv_windows: tuple[int, ...] = (ALL,)  # see KVGroups
    max_model_len: int  # prompt + output
    vocab_size: int
    max_num_batched_tokens: int  # rows of one step, drafts included
    max_draft_tokens: int  # per row; 0 = speculation off
    max_forced_drafts: int = 0  # of a row with a grammar, proposed ones included
    grammar_fault: str = ""  # why no request may have a grammar; empty = they may
    max_queue_len: int  # requests
    max_queue_tokens: int = 0  # of requests that wait; 0 = no bound
    pipeline_depth: int  # plans sent ahead of the newest applied result
    drafter_has_state: bool = False  # it must be kept caught up with the committed tokens
    drafter_looks_up: bool = False  # first, in the request's own text, where it needs no state
    drafter_recurrent: bool = False  # its state begins with a request's first token
    recurrent: bool = False  # a cached prefix is of use only with a snapshot of the state behind it
    num_snapshots: int = 0  # of recurrent state
    prompt_chunk: int = 1  # tokens that recurrent layers take at once: prompts are cut between them
    adaptive_draft_length: bool = False  # else every row gets as many drafts as it may have
    costs: StepCosts | None = None  # None: not measured
    snapshot_interval: int = 64  # between snapshots of a request that decodes
    enable_prefix_caching: bool = True
    tiers: tuple[str, ...] = ()  # behind the block pool, the nearest first
    priority_aging_s: float = 30.0  # seconds of waiting that outweigh one level of priority
    max_plan_bytes: int = MAX_PLAN_BYTES
    headless: bool = False  # the model has no output head: every request must be pooled

    def __post_init__(self) -> None:
        """Raise InvalidRequest for sizes that no request could be served with."""
        if self.num_slots < 1:
            raise InvalidRequest("max_num_seqs must be at least 1", param="max_num_seqs")
        if self.max_num_batched_tokens < self.num_slots + self.prompt_chunk:
            # One token per running request always fits, and prefill always has something left.
            by = f" by {self.prompt_chunk}: a prompt of this model is computed in chunks of so many"
            raise InvalidRequest(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must exceed max_num_seqs "
                f"({self.num_slots}){by if self.prompt_chunk > 1 else ''}",
                param="max_num_batched_tokens",
            )
        if self.num_blocks < 2 or self.max_model_len < 2:
            raise InvalidRequest("the workers have no room for a single request")

    @property
    def max_request_len(self) -> int:
        """Longest request: the newest token of a sequence needs no KV yet."""
        return min(self.max_model_len, self._covered_len + 1)

    @property
    def max_pooled_len(self) -> int:
        """Longest prompt of which a vector can be made: it may fill the context."""
        return self._covered_len

    @property
    def _covered_len(self) -> int:
        """Tokens, at most the context, of which one request alone can keep what it needs."""
        return self.groups.longest(self.num_blocks - 1, self.max_model_len, self.prompt_chunk)

    @property
    def groups(self) -> KVGroups:
        return KVGroups(self.kv_windows, self.block_size)

    @property
    def cache_sizes(self) -> tuple[object, ...]:
        """Sizes and kinds by which blocks and snapshots are found: others find nothing."""
        sizes = self.num_blocks, self.block_size, self.kv_windows, self.usable_snapshots
        drafter = self.drafter_has_state, self.drafter_recurrent
        return *sizes, self.prompt_chunk, *drafter, self.recurrent

    def blocks_of(self, num_tokens: int) -> int:
        """Return the blocks that a request of so many tokens needs, in all KV groups."""
        return self.groups.blocks_of(num_tokens, self.prompt_chunk)

    @property
    def snapshot_border(self) -> int:
        """Tokens at whose multiples a prompt's state is a block's and can be gone on from."""
        return math.lcm(self.block_size, self.prompt_chunk)

    @property
    def has_tiers(self) -> bool:
        """Return whether prefixes may be found in tiers behind the pool."""
        usable = self.usable_snapshots > 0 or not self.recurrent
        return bool(self.tiers) and self.enable_prefix_caching and usable

    @property
    def usable_snapshots(self) -> int:
        """Ids of snapshots that serve the prefix cache."""
        return self.num_snapshots if self.recurrent and self.enable_prefix_caching else 0

    def shared_len(self, prompt_len: int) -> int:
        """Return how many leading tokens have the KV of every request that begins with them.

        What stands behind the whole chunks of a prompt went token by token: in a longer prompt,
        where it is part of a chunk, it is another in its last bits.
        """
        chunk = self.prompt_chunk
        return _ALL if chunk == 1 else prompt_len // chunk * chunk

    def longest(self, pooling: int) -> int:
        """Return the longest request, its output included; a vector counts as one token."""
        return self.max_pooled_len + 1 if pooling else self.max_request_len

    def draft_cap(self, wanted: int | None) -> int:
        """Return the most drafts per step of a request; `wanted` is its own cap, None = none."""
        return self.max_draft_tokens if wanted is None else min(self.max_draft_tokens, wanted)

    def forced_cap(self, wanted: int | None) -> int:
        """Return the most drafts per step of a request with a grammar, as `draft_cap` does."""
        return self.max_forced_drafts if wanted is None else min(self.max_forced_drafts, wanted)

    def check_len(self, num_tokens: int, pooling: int) -> None:
        """Raise RequestTooLarge for a request that leaves no room for output."""
        if num_tokens < self.longest(pooling):
            return
        message = f"leave no room for output: the limit is {self.max_request_len}"
        if pooling:
            message = f"cannot be pooled: the limit is {self.max_pooled_len}"
        raise RequestTooLarge(f"{num_tokens} tokens {message}", param="prompt_ids")

    def admission_bytes(self, num_tokens: int, sampling_bytes: int) -> int:
        """Return the most bytes that admitting a request with so many known ids takes in a plan."""
        return admission_bytes(
            num_tokens,
            self.blocks_of(num_tokens + self.block_size),
            sampling_bytes + _GROUP_BYTES * (len(self.kv_windows) - 1),
            vocab_size=self.vocab_size,
            pool_size=self.num_blocks,
        )

    @property
    def admissions_bytes(self) -> int:
        """Bytes that all admissions of a plan may take."""
        return self.max_plan_bytes - ROWS_BYTES

    def check_bytes(self, num_tokens: int, sampling_bytes: int) -> None:
        """Raise RequestTooLarge for a request that no plan would have room for in the end."""
        num_bytes = self.admission_bytes(num_tokens, sampling_bytes)
        if num_bytes > self.admissions_bytes:
            raise RequestTooLarge(
                f"{num_tokens} tokens and {sampling_bytes} bytes of sampling parameters are more "
                "than a step can admit",
                param="max_tokens",
            )
