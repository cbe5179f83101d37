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
# What each of five streamed chat requests of 24 tokens runs through. These may only come down: a
# function that moves to a file of its own makes its reader open one more. Up to three are of what
# happens every second, where a request takes so long.
_MOST_FILES, _MOST_FOLDERS = 108, 25


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


def _traced(stack: Stack, folder: Path, pids: list[int], turn: int) -> set[tuple[PurePath, str]]:
    """Return files and functions of one request, and of what else happens meanwhile."""

    def wait_for(suffix: str, what: str) -> list[Path]:
        files = [folder / f"{pid}.{suffix}{turn}" for pid in pids]
        stack.wait_until(lambda: all(file.exists() for file in files), what)
        return files

    flag = folder / f"on{turn}"
    flag.touch()
    wait_for("begun", "the start of tracing")
    _chat(stack)
    flag.unlink()
    called = [json.loads(file.read_text()) for file in wait_for("json", "the traces")]
    return {
        (path, function)
        for each in called
        for name, function in each
        if (path := _product(name)) is not None
    }


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
        functions = set.intersection(*(_traced(stack, folder, pids, turn) for turn in range(1, 6)))
    folders = defaultdict[str, set[str]](set)
    for path, _ in functions:
        place = path.parents[1] if path.is_relative_to(_OPS) else path.parent  # all ops are one
        folders[str(place)].add("/".join(path.relative_to(place).parts))
    shown = "\n".join(f"{place}: {', '.join(sorted(names))}" for place, names in folders.items())
    num_files = sum(map(len, folders.values()))
    told = f"{len(functions)} functions in {num_files} files in {len(folders)} folders:\n{shown}"
    assert (num_files <= _MOST_FILES, len(folders) <= _MOST_FOLDERS) == (True, True), told
