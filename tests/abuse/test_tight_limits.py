"""Few files, few addresses, little memory: a server that fits serves, one that does not says so."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Iterator
from pathlib import Path

import httpx
import memory_growth
import psutil
import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from support.faults.deprived_server import Abused, abused, until
from support.faults.streams import Tally
from support.processes.stack import environment

pytestmark = [pytest.mark.timeout(240), pytest.mark.rotates(3, turn=2)]
MIB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")
V1, V2 = CGROUPS / "memory", CGROUPS
FILES = "memory.limit_in_bytes" if V1.is_dir() else "memory.max"


def limited(*limits: str) -> list[str]:
    """A command in front of another, which then has these limits of `ulimit`."""
    lines = [*(f"ulimit {limit}" for limit in limits), 'exec "$@"']
    return ["sh", "-c", " && ".join(lines), "sh"]


async def lose_rank_and_scheduler(server: Abused, tally: Tally) -> None:
    os.kill(server.supervisors()[0]["rank_pid"], signal.SIGKILL)
    await tally.reached(tally.tokens + 10)
    os.kill(server.children("surestep_scheduler")[0].pid, signal.SIGKILL)
    await tally.reached(tally.tokens + 10)


def test_few_files_and_addresses_are_enough(tmp_path: Path) -> None:
    limits = limited("-n 64", "-v 4000000", "-l 0", "-c 0")
    with abused(tmp_path, num_streams=4, max_tokens=300, within=limits) as server:
        assert "Warning: ulimit -n is 64: at most about 16 clients at once" in server.console
        server.survive(lambda tally: lose_rank_and_scheduler(server, tally), longest_s=90)


@contextlib.contextmanager
def starved(pid: int, limit: int, amount: int) -> Iterator[None]:
    """A process that may have only so much, as if another one of the machine had taken the rest."""
    before = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (amount, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and been replaced
            resource.prlimit(pid, limit, before)


async def ask(server: Abused, **fields: object) -> httpx.Response:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, **fields}
    url = server.server.stack.url
    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as client:  # no TLS: quick
        return await client.post("/v1/completions", json=body)


async def answered(*asked: asyncio.Task[httpx.Response]) -> None:
    assert [(await task).status_code for task in asked] == [200] * len(asked)


REGEX = "[a-z]{3}"


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Abused]:
    with abused(tmp_path_factory.mktemp("roomy"), num_streams=4, max_tokens=400) as server:
        yield server


# Standard input, output and error are open everywhere: nothing else can be. As many as a process has
# open would leave it some, if its numbers have gaps, or if it had one open for that moment alone.
NO_FILES = 3


def test_clients_wait_while_the_gateway_has_no_files(roomy: Abused) -> None:
    [gateway] = roomy.children("surestep_gateway")

    async def disturb(tally: Tally) -> Awaitable[None]:
        with starved(gateway.pid, resource.RLIMIT_NOFILE, NO_FILES):
            waiting = [asyncio.create_task(ask(roomy)) for _ in range(6)]
            await tally.reached(tally.tokens + 100)
            assert not any(task.done() for task in waiting)
        return answered(*waiting)

    roomy.survive(disturb, longest_s=90)


def test_a_grammar_is_refused_while_the_rank_has_no_files(roomy: Abused) -> None:
    rank = psutil.Process(roomy.supervisors()[0]["rank_pid"])

    async def disturb(tally: Tally) -> Awaitable[None]:
        with starved(rank.pid, resource.RLIMIT_NOFILE, NO_FILES):
            refused = await ask(roomy, guided_regex=REGEX)
        assert refused.status_code == 503
        assert "Too many open files" in refused.json()["error"]["message"]
        assert int(refused.headers["Retry-After"]) >= 1
        return answered(asyncio.create_task(ask(roomy, guided_regex=REGEX)))

    roomy.survive(disturb, longest_s=90)


def lowest_free(pid: int) -> int:
    """The number that the next file would get: a process that may have so many opens no more."""
    taken = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    return min(set(range(len(taken) + 1)) - taken)


@pytest.mark.parametrize("any_left", [True, False], ids=["those of the last rank", "none"])
def test_a_rank_comes_back_while_its_supervisor_has_no_files(roomy: Abused, any_left: bool) -> None:
    """A standby takes the files of the rank before it; without any, another supervisor comes."""
    roomy.server.stack.wait_until(roomy.server.has_standbys, "a standby")
    [before] = roomy.supervisors()
    files = lowest_free(before["pid"]) if any_left else NO_FILES

    async def disturb(tally: Tally) -> None:
        with starved(before["pid"], resource.RLIMIT_NOFILE, files):
            os.kill(before["rank_pid"], signal.SIGKILL)
            await tally.reached(tally.tokens + 50)

    roomy.survive(disturb, longest_s=90)
    roomy.server.stack.wait_until(roomy.server.has_standbys, "a standby")
    if not any_left:
        assert roomy.supervisors()[0]["pid"] != before["pid"]


async def test_memory_is_told_as_requests_go_by(
    roomy: Abused, capsys: pytest.CaptureFixture[str]
) -> None:
    url = roomy.server.stack.url
    flags = "--requests", "4", "--every", "2", "--clients", "2", "--max-tokens", "2"
    await memory_growth.measure(memory_growth.parse(["--url", url, *flags]))
    head, *rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert head[2:] == ["gateway", "scheduler", "supervisor 0", "rank 0", "its data"]
    assert [row[0] for row in rows] == ["0", "2", "4"]
    assert all(int(cell) > 0 for row in rows for cell in row[2:])


def test_streams_go_on_when_the_scheduler_has_no_memory(roomy: Abused) -> None:
    """Native code ends it when an allocation fails; another one takes over."""
    pid = roomy.server.facts().scheduler_pid
    held = psutil.Process(pid).memory_info().data

    async def disturb(tally: Tally) -> Awaitable[None]:
        with starved(pid, resource.RLIMIT_DATA, held - 20 * MIB):
            many = asyncio.create_task(ask(roomy, prompt=["word " * 50] * 300, max_tokens=1))
            await until(lambda: roomy.server.facts().scheduler_pid != pid, "another scheduler")
        return answered(many)

    roomy.survive(disturb, longest_s=120)


@contextlib.contextmanager
def memory_cgroup(nbytes: int) -> Iterator[list[str]]:
    """A command that moves what it becomes into a cgroup with so much memory."""
    group = (V1 if V1.is_dir() else V2) / f"surestep-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / FILES).write_text(str(nbytes))
    except OSError:
        pytest.skip("no cgroup can be made here")
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def refusal(model: Path, logs: Path, within: list[str], *flags: str) -> str:
    """Return the last words of `surestep serve`."""
    command = [*within, sys.executable, "-m", "surestep_cli", "serve", str(model), "--port", "0"]
    ended = subprocess.run(
        [*command, "--log-dir", str(logs), *flags],
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_what_was_asked_for_and_does_not_fit_is_refused_at_the_start(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path / "model", tokenizer=True, max_position=1 << 20)
    sizes = "--max-num-seqs", "4096", "--max-num-batched-tokens", "8192"
    said = refusal(model, tmp_path / "logs", [], "--kv-cache-memory", "100000", *sizes)
    assert "rank 0 cannot start: --kv-cache-memory: " in said
    assert " GiB are left of " in said


def test_weights_that_do_not_fit_into_the_cgroup_are_refused_at_the_start(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(
        tmp_path / "model", tokenizer=True, hidden=1024, vocab=60_000, intermediate=4096
    )
    with memory_cgroup(600 * MIB) as within:
        said = refusal(model, tmp_path / "logs", within)
    assert "rank 0 cannot start: the weights take 0." in said
    assert "are left of the memory of the cgroup" in said


def test_a_default_cache_shrinks_in_a_small_cgroup(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path / "model", tokenizer=True, max_position=1 << 17)
    with memory_cgroup(900 * MIB) as within:
        command = [*within, sys.executable, "-m", "surestep_cli", "serve", str(model)]
        options = ["--port", "0", "--log-dir", str(tmp_path / "logs"), "--no-standby"]
        with (tmp_path / "out").open("wb") as out:
            server = subprocess.Popen(
                [*command, *options], stdout=out, stderr=out, env=environment({})
            )
        try:
            while b"Stop: Ctrl-C" not in (said := (tmp_path / "out").read_bytes()):
                assert server.poll() is None, said
                time.sleep(0.05)
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
    assert b"kv_cache_memory is lowered from 2.00 to 0." in said
