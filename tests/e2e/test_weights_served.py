"""Weights that change under a served engine: each token is from the version that the answer names."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from e2e.conftest import SPECULATION
from safetensors.torch import load_file, save
from support.checkpoints.tiny import make_tiny_checkpoint
from support.clients.completions import client_of
from support.faults.server import serve_for_faults
from support.processes.stack import Stack

pytestmark = [pytest.mark.timeout(300), pytest.mark.rotates(3, turn=1)]

KEY = {"authorization": "Bearer admin"}
PROMPT = [3 + i % 7 for i in range(20)]
LENGTH = 160
ONE, BOTH = (pytest.mark.parametrize("trained", sizes, indirect=True) for sizes in ([1], [1, 2]))


class Versions(NamedTuple):
    """Folders of one model with different weights."""

    first: Path
    second: Path


@pytest.fixture(scope="module")
def versions(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    second = make_tiny_checkpoint(
        tmp_path_factory.mktemp("second") / "tiny", "llama", seed=8, tokenizer=True
    )
    return Versions(tiny_model, second)


@pytest.fixture(scope="module")
def trained(
    versions: Versions, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Stack]:
    """At a pace at which a request is still open when something is done to it."""
    flags = "--speculative-config", SPECULATION, "--tensor-parallel-size", str(request.param)
    opened = "--enable-weight-updates", "--enable-sleep-mode", "--admin-api-key", "admin"
    folder = tmp_path_factory.mktemp("trained")
    with serve_for_faults(versions.first, folder, *flags, *opened) as running:
        running.stack.headers = KEY
        yield running.stack


def order(stack: Stack, path: str, body: Any = None, *, expect: int = 200) -> Any:
    reply = httpx.post(stack.url + path, headers=KEY, json=body, timeout=120)
    assert reply.status_code == expect, reply.text
    return reply.json()


def send(stack: Stack, path: str, tensors: Mapping[str, Any] | bytes, expect: int = 200) -> Any:
    headers = KEY | {"content-type": "application/octet-stream"}
    data = tensors if isinstance(tensors, bytes) else save(dict(tensors))
    reply = httpx.post(stack.url + path, headers=headers, content=data, timeout=120)
    assert reply.status_code == expect, reply.text
    return reply.json()


def tensors_of(folder: Path) -> dict[str, Any]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


class Answer(NamedTuple):
    ids: list[int]
    choice: dict[str, Any]  # the last one
    header: str | None


def answer(
    stack: Stack,
    ids: list[int] = PROMPT,
    length: int = LENGTH,
    disturb: Callable[[], object] | None = None,
    **extra: Any,
) -> Answer:
    """A greedy stream."""
    client = client_of(stack)
    asked = {"ignore_eos": True, "return_token_ids": True} | extra
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt=ids, max_tokens=length, temperature=0, stream=True, extra_body=asked
    )
    told: list[int] = []
    last: dict[str, Any] = {}
    for number, chunk in enumerate(raw.parse()):
        last = chunk.choices[0].model_dump()
        told += last["token_ids"]
        if number == 5 and disturb is not None:
            disturb()
    return Answer(told, last, raw.headers.get("x-weight-version"))


def version_of(stack: Stack) -> str:
    reply = httpx.get(f"{stack.url}/weight_info", headers=KEY, timeout=30)
    return str(reply.json()["weight_version"])


@pytest.fixture(scope="module")
def answers(trained: Stack, versions: Versions) -> tuple[list[int], list[int]]:
    """Those of the two versions; without drafts they are the same."""
    first = answer(trained)
    assert first.ids[:40] == answer(trained, PROMPT, 40, speculative={"num_tokens": 0}).ids
    assert first.choice["weight_version"] == first.header == version_of(trained) == "default"
    from_disk(trained, versions.second, "second")
    second = answer(trained)
    assert second.ids[:40] == answer(trained, PROMPT, 40, speculative={"num_tokens": 0}).ids
    assert second.choice["weight_version"] == second.header == version_of(trained) == "second"
    assert second.ids != first.ids
    from_disk(trained, versions.first, "first")
    assert answer(trained).ids == first.ids
    return first.ids, second.ids


def from_disk(stack: Stack, folder: Path, version: str, mode: str = "wait") -> Any:
    body = {"model_path": str(folder), "weight_version": version, "mode": mode}
    return order(stack, "/update_weights_from_disk", body)


def from_memory(stack: Stack, folder: Path, version: str, mode: str = "wait") -> Any:
    """Load the file that a trainer on the same machine keeps in memory."""
    fd = os.memfd_create("trainer")
    try:
        os.write(fd, save(tensors_of(folder)))
        return from_disk(stack, Path(f"/proc/{os.getpid()}/fd/{fd}"), version, mode)
    finally:
        os.close(fd)


def by_wire(stack: Stack, folder: Path, version: str, mode: str = "wait") -> Any:
    """In two parts."""
    stage(stack, folder)
    return finish(stack, folder, version, mode)


def stage(stack: Stack, folder: Path) -> None:
    tensors = tensors_of(folder)
    names = sorted(tensors)
    order(stack, "/start_weight_update")
    for part in (names[::2], names[1::2]):
        send(stack, "/update_weights", {name: tensors[name] for name in part})


def finish(stack: Stack, _: Path, version: str, mode: str = "wait") -> Any:
    return order(stack, "/finish_weight_update", {"weight_version": version, "mode": mode})


@BOTH
@pytest.mark.parametrize("update", [from_disk, from_memory, by_wire])
def test_kept_requests_go_on_with_the_new_weights(
    trained: Stack,
    versions: Versions,
    answers: tuple[list[int], list[int]],
    update: Callable[..., Any],
) -> None:
    """And say from where on; what comes is what the new weights make of the text so far."""
    first, second = answers
    if update is by_wire:  # whose parts may come while the answer comes to its end
        stage(trained, versions.second)
    last = finish if update is by_wire else update
    kept = answer(trained, disturb=lambda: last(trained, versions.second, "kept", mode="keep"))
    assert kept.header == "first"
    (_, change) = kept.choice["weight_versions"]
    at = change["first_token"]
    assert (change["weight_version"], kept.choice["weight_version"]) == ("kept", "kept")
    assert 0 < at < LENGTH
    assert kept.ids[:at] == first[:at]
    assert kept.ids[at:] == answer(trained, PROMPT + kept.ids[:at], LENGTH - at).ids
    assert kept.ids[at:] != first[at:]
    assert answer(trained).ids == second
    update(trained, versions.first, "first")
    assert answer(trained).ids == first


@ONE
def test_a_request_that_is_waited_for_ends_with_the_weights_it_began_with(
    trained: Stack, versions: Versions, answers: tuple[list[int], list[int]]
) -> None:
    begun: list[threading.Thread] = []

    def update() -> None:
        begun.append(threading.Thread(target=from_disk, args=[trained, versions.second, "w"]))
        begun[0].start()

    waited = answer(trained, disturb=update)
    begun[0].join()
    assert waited.ids == answers[0]
    assert waited.choice["weight_version"] == "first"
    assert "weight_versions" not in waited.choice
    assert version_of(trained) == "w"
    aborted = answer(
        trained, disturb=lambda: from_disk(trained, versions.first, "first", mode="abort")
    )
    assert aborted.choice["finish_reason"] == "abort"
    assert aborted.ids == answers[1][: len(aborted.ids)]


@ONE
def test_a_part_of_the_tensors(
    trained: Stack, versions: Versions, answers: tuple[list[int], list[int]]
) -> None:
    """Those that do not come stay as they are, and all together are the second version."""
    new = tensors_of(versions.second)
    names = sorted(new)
    told = send(
        trained,
        "/update_weights_from_tensor?weight_version=half",
        {name: new[name] for name in names[::2]},
    )
    assert told["num_tensors"] == len(names[::2])
    mixed = answer(trained).ids
    assert mixed not in answers
    send(trained, "/update_weights_from_tensor", {name: new[name] for name in names[1::2]})
    assert version_of(trained) == "1"
    assert answer(trained).ids == answers[1]
    from_disk(trained, versions.first, "first")


@BOTH
def test_what_is_not_the_model_changes_nothing(
    trained: Stack, versions: Versions, answers: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    new = tensors_of(versions.second)
    name = sorted(new)[0]
    for wrong in (
        {"x": new[name]},
        {name: new[name][:1]},
        {name: new[name].double()},
        b"\x80\x04N.",
    ):
        send(trained, "/update_weights_from_tensor", wrong, expect=400)
    stranger = make_tiny_checkpoint(tmp_path / "qwen", "qwen2", seed=7)
    for folder in (stranger, tmp_path, Path("tiny")):
        body = {"model_path": str(folder)}
        order(trained, "/update_weights_from_disk", body, expect=400)
    order(trained, "/finish_weight_update", expect=400)
    broken = {name: tensor * float("nan") for name, tensor in new.items()}
    kept = answer(
        trained,
        disturb=lambda: send(trained, "/update_weights_from_tensor?mode=keep", broken, expect=400),
    )
    assert kept.ids == answers[0]
    assert version_of(trained) == "first"


def kill(pid: int) -> None:
    """Kill a process, unless it has ended; 0 stands for none."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, signal.SIGKILL)


@BOTH
@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3])
def test_a_rank_dies_in_the_middle_of_an_update(
    trained: Stack, versions: Versions, answers: tuple[list[int], list[int]], delay_s: float
) -> None:
    """Whichever rank it is, and whether it is the old one or the new one."""
    rank = trained.scheduler()["supervisors"][-1]

    def lose() -> None:
        time.sleep(delay_s)
        told = trained.status()["scheduler"]
        kill(told["supervisors"][-1]["rank_pid"] if told else rank["rank_pid"])

    def update() -> None:
        losing = threading.Thread(target=lose)
        losing.start()
        from_disk(trained, versions.second, "kept", mode="keep")
        losing.join()

    kept = answer(trained, disturb=update)
    # A slow machine may end the answer first: then all of it is of the first version.
    *_, last = kept.choice.get("weight_versions", [{"first_token": LENGTH}])
    at = last["first_token"]
    assert kept.ids[:at] == answers[0][:at]
    if at < LENGTH:
        assert kept.ids[at:] == answer(trained, PROMPT + kept.ids[:at], LENGTH - at).ids
    assert version_of(trained) == "kept"
    from_disk(trained, versions.first, "first")
    assert answer(trained).ids == answers[0]


@ONE
def test_a_sleeping_engine_wakes_with_other_weights(
    trained: Stack, versions: Versions, answers: tuple[list[int], list[int]]
) -> None:
    """Wake as a trainer beside it has it: weights first, then the memory for keys and values."""
    for level, update in ((1, from_disk), (2, by_wire), (2, from_disk)):
        order(trained, f"/sleep?level={level}")
        order(trained, "/wake_up?tags=weights")
        update(trained, versions.second, "asleep")
        order(trained, "/wake_up?tags=kv_cache")
        assert version_of(trained) == "asleep"
        assert answer(trained).ids == answers[1]
        from_disk(trained, versions.first, "first")
        assert answer(trained).ids == answers[0]


@ONE
def test_a_sleep_that_forgets_what_came_by_wire_says_so(
    trained: Stack, versions: Versions, answers: tuple[list[int], list[int]]
) -> None:
    by_wire(trained, versions.second, "wired")
    order(trained, "/sleep?level=2")
    order(trained, "/wake_up")
    after = answer(trained)
    assert (after.ids, after.choice["weight_version"]) == (answers[0], "first")


@pytest.mark.parametrize("trained", [2], indirect=True)
@pytest.mark.parametrize("update", [from_disk, by_wire])
def test_weights_that_a_rank_has_lost_are_missed(
    trained: Stack,
    versions: Versions,
    answers: tuple[list[int], list[int]],
    update: Callable[..., Any],
) -> None:
    """Nothing is computed with those that it comes back with: requests wait for the right ones."""
    update(trained, versions.second, "lost")
    supervisor = trained.scheduler()["supervisors"][1]
    kill(supervisor["pid"])
    kill(supervisor["rank_pid"])

    def differs() -> bool:
        return "another checkpoint" in httpx.get(f"{trained.url}/health/ready", timeout=10).text

    with ThreadPoolExecutor(1) as pool:
        trained.wait_until(differs, "a word about rank 1", 60)
        asking = pool.submit(answer, trained)
        update(trained, versions.second, "again")
        assert asking.result().ids == answers[1]
    update(trained, versions.first, "first")
    assert answer(trained).ids == answers[0]
