"""KV events of a served engine, decoded as a router does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import zmq
from e2e.conftest import FLAGS
from support.clients.kv_events import AllBlocksCleared, Index, decoded
from support.processes.ports import free_port
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(240)]
PATIENCE_S = 60
SIZE = 16  # tokens of a block


class Router:
    """An index of what the engine has."""

    def __init__(self, address: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.connect(address)
        self._socket.subscribe("kv@")
        self.index, self.num_cleared, self.next = Index(), 0, 0

    def close(self) -> None:
        self._socket.close(0)

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Follow the events until it is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, what
            if self._socket.poll(100):
                topic, number, payload = self._socket.recv_multipart()
                assert topic == b"kv@here@tiny"
                assert int.from_bytes(number) == self.next or self.next == 0
                self.next = int.from_bytes(number) + 1
                batch = decoded(payload)
                self.num_cleared += isinstance(batch.events[0], AllBlocksCleared)
                self.index.apply(batch)


def ask(stack: Stack, prompt: list[int], **fields: object) -> int:
    """The cached tokens of a prompt."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    cached: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_a_router_knows_what_would_be_found(tiny_model: Path, tmp_path: Path) -> None:
    """With a salt and without, and after the ranks were lost."""
    address = f"tcp://127.0.0.1:{free_port()}"
    bound = address.replace("127.0.0.1", "*")
    config = {"enable_kv_cache_events": True, "endpoint": bound, "topic": "kv@here@tiny"}
    flags = *FLAGS, "--kv-events-config", json.dumps(config)
    prompt = [5 + number % 200 for number in range(4 * SIZE + 3)]
    with (
        zmq.Context() as context,
        closing(Router(address, context)) as router,
        serve(tiny_model, tmp_path, *flags) as stack,
    ):

        def known() -> int:
            return router.index.num_leading(prompt, SIZE)

        router.until(lambda: router.num_cleared > 0, "the first event")
        assert ask(stack, prompt) == known() == 0
        router.until(lambda: known() == 4, "four blocks")
        assert ask(stack, prompt) == 4 * SIZE
        assert router.index.num_leading(prompt, SIZE, "s") == 0
        ask(stack, prompt, cache_salt="s")
        router.until(lambda: router.index.num_leading(prompt, SIZE, "s") == 4, "a salt")
        cleared = router.num_cleared
        stack.kill_rank()
        router.until(lambda: router.num_cleared > cleared, "an end of the epoch")
        router.until(lambda: known() == 4, "what outlives the rank")
        assert ask(stack, prompt) == 4 * SIZE
        told = "surestep:kv_event_batches_total"
        router.until(lambda: router.next == stack.metric(told), "all batches")
        assert stack.metric("surestep:kv_event_batches_dropped_total") == 0
        with closing(Router(address, context)) as late:
            late.until(lambda: late.index.blocks == router.index.blocks, "all of it")


def test_what_keeps_it_from_starting_is_told(tiny_model: Path, tmp_path: Path) -> None:
    config = {"enable_kv_cache_events": True, "endpoint": "ipc:///no/such/folder/events"}
    started = serve(tiny_model, tmp_path, *FLAGS, "--kv-events-config", json.dumps(config))
    with pytest.raises(AssertionError, match="No such file or directory; choose another"), started:
        pass
