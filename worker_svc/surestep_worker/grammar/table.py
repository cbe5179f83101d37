"""The grammars of the slots, and how far each has come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakKeyDictionary

import numpy as np
from surestep_common.errors import SurestepError, UnsupportedParameter
from surestep_proto import sampling_pb2 as pb

from .compiler import Compiler, Process, ended_twice
from .frames import Begin, Frames, Question, wait, windows_of
from .process import STEP_S, took_too_long
from .window import Ask, Window

_TIMEOUT_S = 2.0  # for all windows of a step: less than any step may take


@dataclass(slots=True)
class _Tenant:
    """A request with a grammar."""

    key: int
    params: pb.SamplingParams
    upto: int  # tokens of its slot that its grammar has seen, or is to begin behind
    compiling: Future[Process] | None  # None on ranks that choose nothing
    fault: str
    process: Process | None = None  # that follows it
    emitted: list[int] = field(default_factory=list)  # what another process would have to see

    def question(self, process: Process, ask: Ask) -> Question:
        """Return what to ask this process: from the beginning, if it has not been asked before."""
        if self.process is process:
            return Question(self.key, None, ask)
        self.process = process
        params = self.params
        begins_after, stops = list(params.grammar.begins_after), list(params.stop_token_ids)
        begin = Begin(begins_after, stops, params.min_tokens)
        return Question(self.key, begin, ask._replace(emitted=self.emitted))


class GrammarTable:
    """Follows what slots commit. Not thread-safe, except for `compile`."""

    def __init__(self, vocab_size: int, compiler: Compiler | None, fault: str = "") -> None:
        """`compiler` is None on ranks that choose nothing, and where there is a `fault`."""
        self.fault = fault  # why no request may have a grammar
        self._num_words = -(-vocab_size // 32)
        self._compiler = compiler
        self._tenants = dict[int, _Tenant]()
        self._keys = count()
        self._forgotten = WeakKeyDictionary[Process, list[int]]()  # keys, until it is asked again

    def compile(self, grammar: pb.Grammar) -> Future[Process]:
        """Compile a grammar that is going to be needed. May be called from any thread.

        Who does not want it any more cancels the future, which may have an InvalidRequest or
        Unavailable. Raises UnsupportedParameter where there are no grammars.
        """
        if self._compiler is None:
            raise UnsupportedParameter(self.fault, param="grammar")
        return self._compiler.start(grammar.source, grammar.owner)

    def admit(self, slot: int, params: pb.SamplingParams, prompt_len: int) -> None:
        """Begin to follow a request, whose output begins behind `prompt_len` tokens of its slot."""
        self.free(slot)
        grammar = params.grammar
        compiling = self._compiler.start(grammar.source, grammar.owner) if self._compiler else None
        key, fault = next(self._keys), self.fault
        self._tenants[slot] = _Tenant(key, params, prompt_len, compiling, fault)

    def free(self, slot: int) -> None:
        """Stop following a slot. Freeing a free slot is harmless."""
        tenant = self._tenants.pop(slot, None)
        if tenant is None:
            return
        if tenant.compiling is not None:
            tenant.compiling.cancel()
        if tenant.process is not None:
            self._forgotten.setdefault(tenant.process, []).append(tenant.key)

    def upto(self, slot: int) -> int:
        """Return how many tokens of a slot with a grammar need not be told any more."""
        return self._tenants[slot].upto

    def windows(self, asks: Mapping[int, Ask]) -> dict[int, Window]:
        """Return the windows of slots, which are asked for with the tokens that follow `upto`.

        All are made at once, those of each grammar in its process.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        for slot, ask in asks.items():
            tenant = self._tenants[slot]
            tenant.upto += len(ask.emitted)
            tenant.emitted += ask.emitted
        windows = self._ask(asks, deadline)
        lost = {slot: ask for slot, ask in asks.items() if slot not in windows}
        windows |= self._ask(lost, deadline)  # what a process knew follows from the tokens
        for slot in lost.keys() - windows.keys():
            tenant = self._tenants[slot]
            tenant.fault = tenant.fault or ended_twice().message
        return {slot: windows.get(slot) or self._nothing(slot) for slot in asks}

    def _ask(self, asks: Mapping[int, Ask], deadline: float) -> dict[int, Window]:
        """Return windows, except of grammars that are at fault, or whose process has ended."""
        asked = dict[Process, dict[int, Question]]()
        for slot, ask in asks.items():
            if (process := self._process(slot, deadline)) is not None:
                question = self._tenants[slot].question(process, ask)
                asked.setdefault(process, {})[slot] = question
        began, windows = time.monotonic(), dict[int, Window]()
        for process, questions in asked.items():
            with contextlib.suppress(OSError):  # it has ended, which is seen below
                process.connection.send((self._forgotten.pop(process, []), [*questions.values()]))
        pending: dict[Frames, Process] = {process.connection: process for process in asked}
        while pending:
            ready = wait(pending, deadline - time.monotonic())
            for connection in ready or list(pending):
                process = pending.pop(connection)
                if not ready:
                    process.kill()
                try:
                    answer = windows_of(*process.connection.receive(), self._num_words)
                    windows |= self._received(asked[process], answer)
                except (EOFError, OSError, ValueError):
                    self._lost(process, asked[process], time.monotonic() - began)
        return windows

    def _process(self, slot: int, deadline: float) -> Process | None:
        """Return the process that follows a slot, None if its grammar is at fault."""
        tenant = self._tenants[slot]
        if tenant.fault:
            return None
        if tenant.compiling is None:
            tenant.fault = "grammar: this rank follows no grammars"
            return None
        try:
            return tenant.compiling.result(max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            tenant.fault = f"grammar: it was not compiled within the {_TIMEOUT_S:g} s of a step"
        except SurestepError as error:
            tenant.fault = error.message
        return None

    def _received(self, asked: Iterable[int], answers: Iterable[Window]) -> dict[int, Window]:
        """Return the windows of slots, except of those where nothing can go on."""
        windows = dict[int, Window]()
        for slot, window in zip(asked, answers, strict=True):
            if window.fault and not window.masks:
                self._tenants[slot].fault = window.fault
            else:
                windows[slot] = window
        return windows

    def _lost(self, process: Process, asked: Iterable[int], after_s: float) -> None:
        """Go on without a process that has ended so many seconds after it was asked: with another,
        unless that was time enough for the grammar to be to blame."""
        assert self._compiler is not None
        slow = took_too_long(STEP_S, "say what may come next") if after_s >= STEP_S else None
        for slot in asked:
            tenant = self._tenants[slot]
            grammar, tenant.process = tenant.params.grammar, None
            self._compiler.discard(grammar.source, grammar.owner, process)
            if slow is None:
                tenant.compiling = self._compiler.start(grammar.source, grammar.owner)
            else:
                tenant.fault = slow.message

    def _nothing(self, slot: int) -> Window:
        nothing = np.zeros(self._num_words, dtype=np.int32)
        return Window(masks=[nothing], fault=self._tenants[slot].fault)
