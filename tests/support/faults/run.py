"""One run of sixteen streams, with a fault in the middle, and the oracle for it; and the servers for such runs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from support.checkpoints.deepseek import make_tiny_glm_fp8
from support.checkpoints.tiny import make_tiny_checkpoint
from support.faults.cases import GLM, SETUPS, TURNS, Fault, Setup, shown, turn_of
from support.faults.server import STEP_CEILING_S, FaultyServer, Holdings
from support.faults.streams import (
    LATE,
    MAX_TOKENS,
    Answer,
    Ask,
    Tally,
    differences,
    late_stop,
    mix,
    stream,
)

_RUN_S = 90.0  # for all streams, fault included
_MAX_ENDED = 3  # streams before the fault: drafts that are all accepted make some fast
_NOTICED_S = STEP_CEILING_S + 2.0  # after which every lost epoch is known to be lost
_LEAD = 30  # tokens between the arrival of the late streams and the fault
_HYBRID = Path(__file__).parents[2] / "data" / "tiny-hybrid"
_SPECULATION = {
    "ngram": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}',
    "mtp": '{"method": "qwen3_5_mtp", "num_speculative_tokens": 3}',
    "glm": '{"method": "mtp", "num_speculative_tokens": 2}',
}
_OF_GLM = ("--enable-expert-parallel", "--kv-cache-dtype", "fp8", "--enable-prefix-caching")


@dataclass(frozen=True)
class Served:
    """A server and what it answers when nothing happens."""

    server: FaultyServer
    setup: Setup
    model: Path
    asks: list[Ask]
    expected: list[Answer]
    holdings: Holdings

    @property
    def num_tokens(self) -> int:
        """Of all answers together."""
        return sum(answer.usage[1] for answer in self.expected)


def client_of(url: str) -> AsyncOpenAI:
    """The official client, which must not need a second try."""
    return AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=_RUN_S)


def prepare(server: FaultyServer, setup: Setup, model: Path, rng: random.Random) -> Served:
    """Run the sixteen streams without a fault; stop strings are cut from what they say."""
    asks = mix(rng, max_tokens=MAX_TOKENS // 2 if setup == GLM else MAX_TOKENS)  # it is slow
    expected = asyncio.run(run(server.stack.url, asks))
    stops = [index for index, ask in enumerate(asks) if ask.kind == "stop string"]
    for index in stops:
        asks[index] = asks[index].until(late_stop(expected[index].choices[0].text))
    for index, answer in zip(
        stops, asyncio.run(run(server.stack.url, [asks[i] for i in stops])), strict=True
    ):
        assert answer.choices[0].finish_reason == "stop"
        expected[index] = answer
    server.stack.wait_until(server.has_standbys, "standby processes")
    return Served(server, setup, model, asks, expected, server.holdings())


async def run(
    url: str, asks: list[Ask], at: int = 0, inject: Callable[[], None] | None = None
) -> list[Answer]:
    """All answers. The late streams open, and `inject` is called, around the token `at`."""
    tally = Tally()
    early = len(asks) - LATE if inject else len(asks)
    async with client_of(url) as client, asyncio.timeout(_RUN_S), asyncio.TaskGroup() as tasks:
        open_streams = [tasks.create_task(stream(client, ask, tally)) for ask in asks[:early]]
        if inject is not None:
            await tally.reached(at)
            open_streams += [tasks.create_task(stream(client, ask, tally)) for ask in asks[early:]]
            await tally.reached(at + _LEAD)
            ended = sum(task.done() for task in open_streams)
            assert ended <= _MAX_ENDED, f"the fault comes too late: {ended} streams have ended"
            await asyncio.to_thread(inject)
    return [task.result() for task in open_streams]


def survive(served: Served, fault: Fault, seed: str) -> str:
    """Cause the fault in mid-stream and insist that no client could tell, but by the clock.

    Returns what the clock said.
    """
    try:
        return _survive(served, fault, seed)
    except BaseException as error:
        error.add_note(served.server.stack.tail())
        error.add_note(repr(error))  # reports are cut in the middle
        raise


def _survive(served: Served, fault: Fault, seed: str) -> str:
    rng = random.Random(seed)
    server, rank = served.server, rng.randrange(served.setup.ranks)
    at = rng.randint(1, served.num_tokens // 10)  # the engine is ahead of what clients have read
    if fault.needs_drafts:
        server.draft_again()
    before, targets = server.facts(), server.targets()
    answers = asyncio.run(
        run(server.stack.url, served.asks, at, lambda: fault.inject(server, targets, rank))
    )
    where = f"rank {rank} after token {at} (seed {seed})"
    assert differences(served.expected, answers) == [], where
    assert not server.pending_orders(), f"nothing happened: {where}"
    server.recovered(served.holdings)
    after = server.facts()
    assert shown(fault, before, after), f"{where}: {before} became {after}"
    pause_s = max(answer.pause_s for answer in answers)
    assert pause_s < fault.pause_s, f"{where}: a client waited {pause_s:.1f} s"
    incidents = after.since(before)
    assert all(incident.detect_s < _NOTICED_S for incident in incidents), f"{where}: {incidents}"
    costs = "".join(f"{i.cause} {i.detect_s:.2f} + {i.recover_s:.2f} s, " for i in incidents)
    return f"{served.setup} {fault.name}: {costs}longest pause {pause_s:.2f} s"


def flags(setup: Setup) -> list[str]:
    """For `surestep serve`."""
    ranks = ["--tensor-parallel-size", str(setup.ranks)]
    if setup.speculation == "none":
        return ranks
    drafts = ["--speculative-config", _SPECULATION[setup.speculation]]
    own = _OF_GLM if setup == GLM else ()
    return [*ranks, *drafts, *own, "--no-adaptive-draft-length"]


def model(setup: Setup, folder: Path) -> Path:
    """A trained hybrid with its MTP head, or a random GLM or Llama, always the same, in `folder`."""
    if setup.speculation == "mtp":
        return _HYBRID
    if setup == GLM:
        return make_tiny_glm_fp8(folder / "tiny", max_position=2048)
    return make_tiny_checkpoint(folder / "tiny", "llama", seed=7, tokenizer=True, max_position=1024)


def served_by(setups: Iterable[str]) -> pytest.MarkDecorator:
    """The test runs against the servers of these setups, each where the share has its faults."""
    named = {str(setup): setup for setup in SETUPS}
    marks = {name: pytest.mark.rotates(len(TURNS), turn=turn_of(name)) for name in setups}
    params = [pytest.param(named[name], id=name, marks=mark) for name, mark in marks.items()]
    return pytest.mark.parametrize("served", params, indirect=True, scope="session")
