"""A GGUF file behind `surestep serve`, on two ranks: text, drafts, a killed worker, a broken file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from support.checkpoints.gguf_files import write_gguf
from support.checkpoints.tiny import make_tiny_checkpoint
from support.clients.completions import client_of, read
from support.processes.stack import Stack, environment, own_cache, serve

pytestmark = [pytest.mark.timeout(180), pytest.mark.rotates(3, turn=2)]

NAME = "tiny-q4"
FLAGS = (
    *("--max-num-seqs", "8", "--kv-cache-memory", "0.02", "--max-model-len", "400"),
    *("--tensor-parallel-size", "2", "--no-adaptive-draft-length"),
    *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    source = make_tiny_checkpoint(path / "source", tokenizer=True, intermediate=128)
    write_gguf(source, path / f"{NAME}.gguf", lambda name: Type.Q4_1)
    return path / f"{NAME}.gguf"


@pytest.fixture(scope="module")
def stack(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    cache = own_cache(tmp_path_factory.mktemp("cache"))
    variables = {"XDG_CACHE_HOME": str(cache)}
    with serve(file, tmp_path_factory.mktemp("logs"), *FLAGS, variables=variables) as running:
        yield running


def complete(stack: Stack, drafts: int, **options: Any) -> Any:
    options = {"max_tokens": 150, "temperature": 0.9, "seed": 5} | options
    extra = {"speculative": {"num_tokens": drafts}}
    return client_of(stack).completions.create(
        model=NAME, prompt="a quick", extra_body=extra, **options
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_no_text(stack: Stack, temperature: float) -> None:
    texts = {
        complete(stack, drafts, temperature=temperature).choices[0].text for drafts in (0, 1, 4)
    }
    assert len(texts) == 1
    assert texts != {""}
    assert stack.metric("vllm:spec_decode_num_draft_tokens_total") > 0


def test_a_chat_has_the_template_of_the_file(stack: Stack) -> None:
    reply = client_of(stack).chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "the dog"}], max_tokens=5
    )
    assert reply.usage is not None
    assert reply.usage.prompt_tokens > 8


def test_a_killed_worker_changes_no_text(stack: Stack, file: Path) -> None:
    """The file is gone by then: its weights outlive the rank."""
    plain = complete(stack, 0).choices[0].text
    file.rename(file.with_suffix(".gone"))
    try:
        told = read(complete(stack, 4, stream=True), lambda: stack.kill_rank(1))
        assert told.text == plain
    finally:
        file.with_suffix(".gone").rename(file)


@pytest.mark.parametrize("command", ["serve", "verify", "fetch"])
def test_a_broken_file_ends_the_command_in_a_line(file: Path, tmp_path: Path, command: str) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:-100])
    done = subprocess.run(
        [sys.executable, "-m", "surestep_cli", command, str(broken)],
        env=environment({"XDG_CACHE_HOME": str(tmp_path / "cache")}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = done.stdout + done.stderr
    assert done.returncode != 0
    assert "broken.gguf: tensor" in " ".join(told.split())
    assert "the file is cut off" in " ".join(told.split())
    assert "Traceback" not in told
