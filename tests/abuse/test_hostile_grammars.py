"""Grammars that take for ever, on a server as a user starts it: what others get meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest
from llguidance import LLMatcher
from support.checkpoints.tiny import make_tiny_checkpoint
from support.faults.server import FaultyServer, serve_for_faults
from support.hostile_grammars import costly_to_compile, costly_to_follow
from support.processes.ports import free_address
from surestep_common.errors import InvalidRequest, QueueFull, SurestepError, Unavailable
from surestep_common.rpc import from_rpc_error
from surestep_proto.sampling_pb2 import Grammar, SamplingParams
from surestep_proto.scheduler_pb2 import GenerateRequest
from surestep_proto.scheduler_pb2_grpc import SchedulerStub

pytestmark = pytest.mark.timeout(240)
KEY = "a key of a client"
METADATA = (("authorization", f"Bearer {KEY}"),)
PATIENCE_S = 120.0  # on a machine that others use too
GAP_S = 5.0  # of a stream there; without processes of their own, grammars held it up for ever


class Served:
    """A server, and requests to its scheduler."""

    def __init__(self, server: FaultyServer, channel: grpc.Channel) -> None:
        self.server, self._stub = server, SchedulerStub(channel)
        self._number = 0

    def call(self, source: str = "", tenant: str = "", max_tokens: int = 40, **params: Any) -> Any:
        self._number += 1
        sampling = SamplingParams(top_p=1, repetition_penalty=1, **params)
        if source:
            sampling.grammar.CopyFrom(Grammar(source=source))
        request = GenerateRequest(
            request_id=str(self._number),
            prompt_ids=[5, 6, 7],
            max_tokens=max_tokens,
            sampling=sampling,
            tenant=tenant,
            ignore_eos=True,
        )
        return self._stub.Generate(request, metadata=METADATA, timeout=PATIENCE_S)

    def ask(self, source: str = "", tenant: str = "", max_tokens: int = 40, **params: Any) -> int:
        """Return the number of tokens. Raises a SurestepError."""
        call = self.call(source, tenant, max_tokens, **params)
        try:
            return sum(len(chunk.token_ids) for chunk in call)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def gaps(self, max_tokens: int) -> float:
        """Return the longest time between two chunks of a stream without a grammar."""
        longest, latest = 0.0, time.monotonic()
        for _ in self.call(max_tokens=max_tokens, tenant="plain"):
            longest, latest = max(longest, time.monotonic() - latest), time.monotonic()
        return longest

    def grammar_processes(self) -> list[psutil.Process]:
        """Return the processes of grammars, that with the tokenizer not among them."""
        (rank,) = self.server.facts().rank_pids
        return psutil.Process(rank).children(recursive=True)[1:]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("hostile")
    model = make_tiny_checkpoint(
        folder / "tiny", "llama", seed=7, tokenizer=True, max_position=4096
    )
    address = free_address()
    door = ("--scheduler-listen", address, "--grpc-api-key", KEY, "--step-deadline-floor-s", "8")
    with (
        serve_for_faults(model, folder, *door) as server,
        grpc.insecure_channel(address) as channel,
    ):
        yield Served(server, channel)


def schema(name: str) -> str:
    source: str = LLMatcher.grammar_from_json_schema(
        {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]},
        defaults={"whitespace_flexible": False},
    )
    return source


def refusal(future: Future[int]) -> SurestepError:
    error = future.exception(PATIENCE_S)
    assert isinstance(error, SurestepError), error
    return error


def test_an_honest_schema_is_served_beside_grammars_that_take_for_ever(served: Served) -> None:
    rank = served.server.facts().rank_pids
    served.ask(schema("first"))
    with ThreadPoolExecutor(3) as threads:
        hostile = [threads.submit(served.ask, costly_to_compile(i), "hostile") for i in range(2)]
        stream = threads.submit(served.gaps, 300)
        assert served.ask(schema("honest"), "honest") > 0
        assert stream.result(PATIENCE_S) < GAP_S
        errors = [refusal(future) for future in hostile]
    assert all(isinstance(error, InvalidRequest | Unavailable) for error in errors), errors
    assert served.server.facts().rank_pids == rank


def test_a_grammar_whose_masks_take_for_ever_ends_its_request_alone(served: Served) -> None:
    rank = served.server.facts().rank_pids
    source, _ = costly_to_follow()
    with ThreadPoolExecutor(2) as threads:
        stream = threads.submit(served.gaps, 300)
        with pytest.raises(InvalidRequest, match=r"processor time|windows of a step"):
            served.ask(source, max_tokens=100, min_tokens=90)
        assert stream.result(PATIENCE_S) < GAP_S
    assert served.server.facts().rank_pids == rank


@pytest.mark.rotates(3)
def test_a_tenant_cannot_fill_the_queue_with_grammars(served: Served) -> None:
    with ThreadPoolExecutor(40) as threads:
        flood = [threads.submit(served.ask, costly_to_compile(6, i), "flood") for i in range(40)]
        while not any(future.done() for future in flood):
            time.sleep(0.05)
        assert served.ask(schema("modest"), "modest") > 0
        errors = [refusal(future) for future in flood]
    kinds = {type(error) for error in errors}
    assert QueueFull in kinds
    assert kinds <= {QueueFull, Unavailable, InvalidRequest}
    assert all(error.retry_after for error in errors if not isinstance(error, InvalidRequest))


def test_a_compilation_ends_when_its_client_goes_away(served: Served) -> None:
    served.ask(schema("first"))
    before = {process.pid for process in served.grammar_processes()}
    call = served.call(costly_to_compile(4), tenant="leaves")
    while not (new := {p.pid for p in served.grammar_processes()} - before):
        time.sleep(0.02)
    call.cancel()
    served.server.stack.wait_until(
        lambda: not new & {p.pid for p in served.grammar_processes()}, "the end of it", 1.5
    )


@pytest.mark.rotates(3)
def test_grammar_processes_that_are_killed_change_nothing(served: Served) -> None:
    source = LLMatcher.grammar_from_regex("([a-z]{3} ){80}")

    def tokens() -> Iterator[int]:
        for chunk in served.call(source, max_tokens=200, seed=3, temperature=1.0):
            yield from chunk.token_ids

    expected, found = list(tokens()), list[int]()
    for token in tokens():
        found.append(token)
        if len(found) % 60 == 10:
            for process in served.grammar_processes():
                os.kill(process.pid, signal.SIGKILL)
    assert found == expected


@pytest.mark.rotates(3)
def test_a_rank_that_dies_while_it_compiles(served: Served) -> None:
    with ThreadPoolExecutor(2) as threads:
        hostile = threads.submit(served.ask, costly_to_compile(5), "hostile")
        honest = threads.submit(served.ask, schema("early"), "honest", 300)
        before = {process.pid for process in served.grammar_processes()}
        (rank,) = served.server.facts().rank_pids
        os.kill(rank, signal.SIGKILL)
        assert honest.result(PATIENCE_S) > 0
        assert isinstance(refusal(hostile), InvalidRequest | Unavailable)
    left = [psutil.Process(pid) for pid in before if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(left, timeout=PATIENCE_S)[1]
