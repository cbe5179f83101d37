"""The grammars of the slots, and how far each has come."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from surestep_common.errors import InvalidRequest, SurestepError, UnsupportedParameter
from surestep_common.invariants import BoolArray, IntArray
from surestep_proto import sampling_pb2 as pb

from .compiler import Compiler, compiled
from .walk import Walk
from .window import Window, make_window, mask_window


@dataclass(slots=True)
class _Tenant:
    """A request with a grammar."""

    params: pb.SamplingParams
    upto: int  # tokens of its slot that the walk has come by, or is to begin behind
    matcher: Future[LLMatcher] | None  # of its grammar, until the walk begins; None on other ranks
    walk: Walk | None = None
    fault: str = ""


class GrammarTable:
    """Follows what slots commit. Not thread-safe, except for `compile`."""

    def __init__(
        self, num_slots: int, vocab_size: int, compiler: Compiler | None, fault: str = ""
    ) -> None:
        """`compiler` is None on ranks that choose nothing, and where there is a `fault`."""
        self.fault = fault  # why no request may have a grammar
        self.num_words = -(-vocab_size // 32)
        self._compiler = compiler
        self._tenants = dict[int, _Tenant]()
        self._has = np.zeros(num_slots + 1, dtype=np.bool_)  # rows of padding have none

    def compile(self, grammar: pb.Grammar) -> None:
        """Compile a grammar that is going to be needed. May be called from any thread.

        Raises UnsupportedParameter where there are no grammars, InvalidRequest for one that is
        wrong.
        """
        if self._compiler is None:
            raise UnsupportedParameter(self.fault, param="grammar")
        self._compiler.compile(grammar.source, grammar.owner)

    def admit(self, slot: int, params: pb.SamplingParams, prompt_len: int) -> None:
        """Begin to follow a request, whose output begins behind `prompt_len` tokens of its slot."""
        self.free(slot)
        if not params.HasField("grammar"):
            return
        source, owner = params.grammar.source, params.grammar.owner
        matcher = self._compiler.start(source, owner) if self._compiler else None
        self._tenants[slot] = _Tenant(params, prompt_len, matcher, fault=self.fault)
        self._has[slot] = True

    def free(self, slot: int) -> None:
        """Stop following a slot. Freeing a free slot is harmless."""
        self._has[slot] = False
        self._tenants.pop(slot, None)

    def has(self, slots: IntArray) -> BoolArray:
        """Return which of slots [R] have a grammar."""
        found: BoolArray = self._has[slots]
        return found

    def upto(self, slot: int) -> int:
        """Return how many tokens of a slot with a grammar need not be told any more."""
        return self._tenants[slot].upto

    def window(
        self, slot: int, emitted: Sequence[int], proposed: Sequence[int], most: int
    ) -> Window:
        """Return the window of a slot after these tokens, which follow those up to `upto`."""
        walk = self._advance(slot, emitted)
        if walk is None:
            return self._nothing(slot)
        return make_window(walk, proposed, most, self.num_words)

    def masks(self, slot: int, emitted: Sequence[int], drafts: Sequence[int]) -> Window:
        """Return the masks of a slot's window, as `window` does, whose drafts are settled."""
        walk = self._advance(slot, emitted)
        return self._nothing(slot) if walk is None else mask_window(walk, drafts, self.num_words)

    def _advance(self, slot: int, emitted: Sequence[int]) -> Walk | None:
        """Return the walk of a slot after these tokens, None if its grammar is at fault."""
        tenant = self._tenants[slot]
        tenant.upto += len(emitted)
        try:
            if tenant.walk is None and not tenant.fault:
                tenant.walk = _begin(tenant)
            for token in emitted if not tenant.fault else ():
                assert tenant.walk is not None
                tenant.walk.advance(token)
        except SurestepError as error:
            tenant.fault = error.message
        return tenant.walk if not tenant.fault else None

    def _nothing(self, slot: int) -> Window:
        nothing = np.zeros(self.num_words, dtype=np.int32)
        return Window(masks=[nothing], fault=self._tenants[slot].fault)


def _begin(tenant: _Tenant) -> Walk:
    """Return the walk of a request that has emitted nothing. Raises InvalidRequest."""
    if tenant.matcher is None:
        raise InvalidRequest("grammar: this rank follows no grammars", param="grammar")
    params, matcher = tenant.params, compiled(tenant.matcher).deep_copy()
    tenant.matcher = None
    return Walk(matcher, params.grammar.begins_after, params.stop_token_ids)
