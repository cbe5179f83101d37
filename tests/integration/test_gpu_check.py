"""scripts/gpu_check from end to end on a CPU: tiny models, and tools that stand in for NVIDIA's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check"
# Options of these tools have a value each; behind them stands what they watch.
WATCHES = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift 2; done\nexec "$@"\n'
TOOLS = {
    "nvidia-smi": "#!/bin/bash\necho 'NVIDIA-SMI of a test'\n",
    "ncu": WATCHES,
    "compute-sanitizer": WATCHES,
}
SECONDS = 400  # of a call here, where others may be busy


class DryRun:
    """Calls of the script, in folders of their own."""

    def __init__(self, folder: Path) -> None:
        self.out, self.pack, self.cache = folder / "out", folder / "pack.tgz", folder / "cache.tgz"
        tools = folder / "tools"
        tools.mkdir()
        for name, text in TOOLS.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        places = {"OUT": self.out, "PACK": self.pack, "CACHE": self.cache}
        places |= {"MODELS": folder / "models", "WHEELS": folder / "none", "TMPDIR": folder}
        path = f"{tools}:{os.environ['PATH']}"
        told = {name: str(place) for name, place in places.items()}
        budget = {"DRY": "1", "PYTHON": sys.executable, "BUDGET_S": str(SECONDS)}
        self.env = os.environ | told | budget | {"PATH": path, "OMP_NUM_THREADS": "1"}

    def start(self, *parts: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [SCRIPT, *parts], env=self.env | env, text=True, cwd=ROOT, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def __call__(self, *parts: str, **env: str) -> tuple[int, dict[str, str]]:
        """Exit status, and how each part fared."""
        process = self.start(*parts, **env)
        said, _ = process.communicate(timeout=SECONDS + 60)
        table = said.rstrip().rpartition("\n\n")[2].splitlines()
        states = {row.split()[0]: " ".join(row.split()[1:-2]) for row in table}
        assert states, said
        return process.returncode, states

    def packed(self) -> dict[str, bytes]:
        """What would come back."""
        with tarfile.open(self.pack) as archive:
            files = [member for member in archive if member.isfile()]
            return {Path(m.name).name: archive.extractfile(m).read() for m in files}  # type: ignore[union-attr]


@pytest.fixture
def dry(tmp_path: Path) -> DryRun:
    return DryRun(tmp_path)


def _json(files: dict[str, bytes], name: str) -> Any:
    return json.loads(files[name])


def _are_there(files: dict[str, bytes], names: Sequence[str]) -> None:
    assert set(names) <= set(files), sorted(files)


@pytest.mark.timeout(SECONDS + 100)
@pytest.mark.rotates(3, turn=0)
def test_the_first_call_runs_whole(dry: DryRun) -> None:
    status, states = dry("first")
    assert status == 0, states
    fared = dict.fromkeys(
        ("versions", "probe", "compile", "kernels", "engine", "decode", "long"), "ok"
    )
    fared |= dict.fromkeys(("make-tiny-llama", "trace", "ops"), "ok")
    assert states == fared
    files = dry.packed()
    _are_there(files, [f"{name}.log" for name in fared])
    _are_there(files, ["summary.txt", "trace.json.gz"])
    assert b"NVIDIA-SMI of a test" in files["versions.log"]
    assert _json(files, "versions.json")["versions"]["interpreted"] is True
    assert len(_json(files, "probe.json")["probe"]) == 4
    assert b" passed" in files["kernels.log"]
    lines = _json(files, "decode.json")["decode"]
    assert [line.get("top_p") for line in lines] == [1.0, 1.0, 1.0, 0.9, None]
    assert lines[-1]["transformers"] is True
    assert _json(files, "trace.json")["trace"]["steps"] > 0
    assert {line["op"] for line in _json(files, "ops.json")["ops"]} == {"rms_norm"}
    with tarfile.open(dry.cache) as cache:  # compiled for sm_90: to be carried to the next call
        assert any(name.endswith(".cubin") for name in cache.getnames())
    _, states = dry("compile")
    assert states["compile"] == "ok"


@pytest.mark.timeout(SECONDS + 100)
@pytest.mark.rotates(3, turn=1)
def test_the_second_call_runs_whole(dry: DryRun) -> None:
    status, states = dry("second")
    assert status == 0, states
    fared = dict.fromkeys(("dependent", "ncu", "divergence", "hybrid", "sanitizer"), "ok")
    fared |= dict.fromkeys(("make-tiny-llama", "make-tiny-qwen3.5"), "ok")
    assert states == fared | {"ranks": "one GPU only"}
    files = dry.packed()
    dependent = _json(files, "dependent.json")["dependent_launch"]
    assert [line["equal"] for line in dependent] == [True, True, True]
    assert [line.get("window") for line in dependent] == [None, 1, 4]
    divergence = _json(files, "divergence.json")["divergence"]
    assert divergence["with drafts and without"]["equal"] == 2
    assert [line["window"] for line in _json(files, "hybrid.json")["decode"]] == [1, 1, 4]
    assert b'"op": "rms_norm"' in files["ncu.log"]


def test_a_call_that_is_killed_leaves_what_it_had_whole(dry: DryRun, tmp_path: Path) -> None:
    """After a part that failed, and within one that would not end."""
    slow = tmp_path / "python"
    slow.write_text(
        "#!/bin/bash\ncase $1 in\n"
        "  */gpu_versions.py) exec sleep 1000 ;;\n"
        "  */gpu_ops.py) echo a figure; exit 7 ;;\n"
        "  */make_shaped_checkpoint.py) mkdir -p $3 ;;\n"
        "  -) cat >/dev/null ;;\n  *) exit 0 ;;\nesac\n"
    )
    slow.chmod(0o755)
    process = dry.start("ops", "decode", "versions", PYTHON=str(slow))
    assert process.stdout is not None
    for line in process.stdout:
        if line == "== versions\n":
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    files = dry.packed()
    assert files["ops.log"] == b"a figure\n"
    told = files["summary.txt"].decode().splitlines()
    assert [row.split()[:-2] for row in told] == [
        ["ops", "rc", "7"], ["make-tiny-llama", "ok"], ["decode", "ok"]
    ]  # fmt: skip


def test_a_cache_that_is_broken_is_told_and_does_no_harm(dry: DryRun, tmp_path: Path) -> None:
    dry.cache.write_bytes(b"no archive")
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\n[[ $1 != - ]] || cat >/dev/null\n")
    python.chmod(0o755)
    process = dry.start("ops", PYTHON=str(python))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "cache.tgz is of no use" in said
    assert tarfile.is_tarfile(dry.cache)
