"""The way of a request: how many files one has to open to follow it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path, PurePath

import httpx
import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.stack import Stack, serve

_TRACE = Path(__file__).with_name("trace")
_ROOT = Path(__file__).parents[2]
_OPS = PurePath("kernels", "surestep_kernels")
# What one streamed chat request of 24 tokens runs through. These may only come down: a function
# that moves to a file of its own makes its reader open one more. Up to four are of what happens at
# intervals, heartbeats for one.
_MOST_FILES, _MOST_FOLDERS = 108, 26


def _product(name: str) -> PurePath | None:
    path = Path(name)
    if not path.is_relative_to(_ROOT):
        return None
    inside = path.relative_to(_ROOT)
    ours = inside.parts[0] not in ("tests", "proto", ".venv") and path.suffix == ".py"
    return inside if ours else None


def _chat(stack: Stack) -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "model": "tiny",
        "max_tokens": 24,
        "ignore_eos": True,
        "stream": True,
    }
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.text.rstrip().endswith("[DONE]"), answer.text


@pytest.mark.timeout(180)
def test_the_way_of_a_request_is_short(tmp_path: Path) -> None:
    model, folder = make_tiny_checkpoint(tmp_path / "model", tokenizer=True), tmp_path / "trace"
    folder.mkdir()
    variables = {"PYTHONPATH": str(_TRACE), "TRACE_FOLDER": str(folder)}
    flags = ("--dtype", "float32", "--served-model-name", "tiny", "--max-num-seqs", "8")
    with serve(model, tmp_path / "logs", *flags, variables=variables) as stack:
        _chat(stack)  # what is made when first wanted is made
        pids = [stack.status()["gateway"]["pid"], stack.scheduler()["pid"]]
        pids += [each["rank_pid"] for each in stack.scheduler()["supervisors"]]
        flag = folder / "on"
        flag.touch()
        stack.wait_until(
            lambda: all((folder / f"{pid}.begun").exists() for pid in pids), "the start of tracing"
        )
        _chat(stack)
        flag.unlink()
        stack.wait_until(
            lambda: all((folder / f"{pid}.json").exists() for pid in pids), "the traces"
        )
    functions = {
        (path, function)
        for pid in pids
        for name, function in json.loads((folder / f"{pid}.json").read_text())
        if (path := _product(name)) is not None
    }
    folders = defaultdict[str, set[str]](set)
    for path, _ in functions:
        place = path.parents[1] if path.is_relative_to(_OPS) else path.parent  # all ops are one
        folders[str(place)].add("/".join(path.relative_to(place).parts))
    shown = "\n".join(f"{place}: {', '.join(sorted(names))}" for place, names in folders.items())
    num_files = sum(map(len, folders.values()))
    told = f"{len(functions)} functions in {num_files} files in {len(folders)} folders:\n{shown}"
    assert (num_files <= _MOST_FILES, len(folders) <= _MOST_FOLDERS) == (True, True), told
