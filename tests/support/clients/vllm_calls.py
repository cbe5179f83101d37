"""Requests in the terms of vllm.grpc.engine, a scheduler to send them to, and what must come back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.clients.vllm_wire import WireClient, new
from support.fakes.model import FakeModel
from support.fakes.worker import fake_worker
from support.processes.scheduler_harness import (
    Client,
    Gate,
    expected,
    make_request,
    make_settings,
    scheduler,
)
from surestep_common.request_params import sibling_seed

MODEL = FakeModel()
PROMPT = [5, 9, 2, 77, 30]


def ask(request_id: str = "a", *, stream: bool = True, **sampling: Any) -> Any:
    """A request of theirs."""
    values: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "seed": 4, **sampling}
    values = {name: value for name, value in values.items() if value is not None}
    return new(
        "GenerateRequest",
        request_id=request_id,
        tokenized={"input_ids": PROMPT},
        sampling_params=values,
        stream=stream,
    )


def tokens_of(index: int = 0, max_tokens: int = 12, **sampling: Any) -> list[int]:
    """What a sequence must emit."""
    message = make_request(0, max_tokens=max_tokens, stop_token_ids=[], **sampling)
    message.prompt_ids[:] = PROMPT
    message.sampling.seed = sibling_seed(4, index)
    return expected(MODEL, message)


@asynccontextmanager
async def served(
    model: FakeModel = MODEL, gate: Gate | None = None, **settings: Any
) -> AsyncIterator[tuple[Client, WireClient]]:
    """A scheduler, and a client of each kind in front of it."""
    hooks: dict[str, Any] = {} if gate is None else {"before_step": gate}
    async with (
        fake_worker(model, **hooks) as worker,
        scheduler(make_settings([worker], **settings)) as client,
    ):
        yield client, WireClient(client.channel)
