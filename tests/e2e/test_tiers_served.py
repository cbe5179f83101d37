"""Tiers behind the blocks of served engines: restarts, replicas, two ranks, and what breaks them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from e2e.conftest import FLAGS, SPECULATION
from pydantic import ValidationError
from support.faults.private_mounts import needs_mounts, within
from support.processes.redis_server import redis_server
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(240), pytest.mark.rotates(3)]

PROMPT = "".join(f"{number} and then " for number in range(30))
CACHED = 160  # tokens of it in whole blocks


class Starts:
    """Starts servers of the tiny model, one or several at a time."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._count = 0

    @contextlib.contextmanager
    def __call__(self, *flags: str, **how: Any) -> Iterator[Stack]:
        self._count += 1
        logs = self._folder / f"logs{self._count}"
        logs.mkdir()
        flags = (*FLAGS, "--speculative-config", SPECULATION, *flags)
        with serve(self._model, logs, *flags, **how) as stack:
            yield stack


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Starts:
    return Starts(tiny_model, tmp_path)


def ask(stack: Stack, prompt: str = PROMPT) -> tuple[list[int], int]:
    """Token ids of an answer, and the tokens of the prompt that were cached."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "seed": 5, "temperature": 0.8}
    body |= {"ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["token_ids"], details["cached_tokens"]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.*") if path.is_file()]


def test_a_restart_finds_the_folder(start: Starts, tmp_path: Path) -> None:
    flags = "--kv-offloading-folder", str(tmp_path / "tier")
    with start(*flags) as first:
        whole, cached = ask(first)
        assert cached == 0
    with start(*flags) as second:
        assert ask(second) == (whole, CACHED)
        assert second.metric("vllm:external_prefix_cache_hits_total") == CACHED
        assert second.metric("vllm:prompt_tokens_cached_by_source_total") == CACHED
        assert ask(second, PROMPT + "more")[1] >= CACHED
    with start(*flags, "--block-size", "8") as other:
        assert ask(other) == (whole, 0)  # blocks of another size are others


def test_two_ranks_have_it_or_none(start: Starts, tmp_path: Path) -> None:
    flags = "--tensor-parallel-size", "2", "--kv-offloading-folder", str(tmp_path / "tier")
    with start(*flags) as first:
        whole, _ = ask(first)
    with start(*flags) as second:
        assert ask(second) == (whole, CACHED)
    others = min(path for path in (tmp_path / "tier").iterdir() if path.is_dir())
    for path in files(others)[::2]:
        path.unlink()
    with start(*flags) as third:
        again, cached = ask(third)
        assert again == whole
        assert cached < CACHED


def test_wrong_files_are_not_used(start: Starts, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    flags = "--kv-offloading-folder", str(folder)
    with start(*flags) as first:
        whole, _ = ask(first)
    for number, path in enumerate(sorted(files(folder))):
        data = bytearray(path.read_bytes())
        match number % 4:
            case 0:
                data[-7] ^= 1
            case 1:
                del data[100:]
            case 2:
                data[:] = sorted(files(folder))[number - 1].read_bytes()
            case _:
                path.unlink()
                os.mkfifo(path)
                continue
        path.write_bytes(data)
    with start(*flags) as second:
        assert ask(second) == (whole, 0)
        assert "of the folder is not used: " in second.tail()


def test_replicas_share_a_store_that_may_die(start: Starts, tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, server):
        config = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
        lmcache = {"LMCACHE_LOCAL_CPU": "False", "LMCACHE_REMOTE_URL": url}
        theirs = start("--kv-transfer-config", json.dumps(config), variables=lmcache)
        with start("--kv-offloading-store", url) as first, theirs as second:
            whole, cached = ask(first)
            assert cached == 0
            with redis.Redis.from_url(url) as client:
                keys = 2 + CACHED // 16  # the books among them
                first.wait_until(lambda: client.dbsize() >= keys, "blocks in the store")
            assert ask(second) == (whole, CACHED)
            other, _ = ask(first, "in the beginning " + PROMPT)
            server.send_signal(signal.SIGSTOP)
            assert ask(second, "in the beginning " + PROMPT)[0] == other
            server.kill()
            server.wait()
            assert ask(second, "at the end " + PROMPT)[0] == ask(first, "at the end " + PROMPT)[0]
            assert "the store behind the KV cache rests" in second.tail()


@needs_mounts
def test_a_full_disk_is_told_and_costs_nothing(start: Starts, tmp_path: Path) -> None:
    full = tmp_path / "full"
    flags = "--kv-offloading-folder", str(full / "tier"), "--kv-offloading-size", "0.01"
    with start(*flags, within=within({full: "128k"}, filled=())) as stack:
        whole, _ = ask(stack)
        told = "the folder behind the KV cache rests: [Errno 28]"
        stack.wait_until(lambda: told in stack.tail(), "a full disk")
        assert ask(stack)[0] == whole


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--kv-offloading-folder", "{file}"), "/file cannot be used: File exists"),
        (("--kv-offloading-size", "99999"), "--kv-offloading-size: 99999.00 GiB on each rank"),
        (
            ("--kv-offloading-size", "1", "--no-enable-prefix-caching"),
            "tiers behind the KV blocks need --enable-prefix-caching",
        ),
        (
            ("--kv-transfer-config", '{"kv_connector": "NixlConnector"}'),
            "kv_connector 'NixlConnector' is not served",
        ),
    ],
)
def test_tiers_that_cannot_be_are_refused_at_the_start(
    start: Starts, tmp_path: Path, flags: tuple[str, ...], told: str
) -> None:
    (tmp_path / "file").write_text("")
    started = start(*(flag.replace("{file}", str(tmp_path / "file")) for flag in flags))
    with pytest.raises((AssertionError, ValidationError)) as failed, started:
        pass
    assert told in str(failed.value)
