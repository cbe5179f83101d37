"""scripts/gpu_check from end to end on a CPU: tiny models, and tools that stand in for NVIDIA's.

What it imports is held to what a machine with a GPU has: the packages of an image, and the wheels.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import carry_kernels
import pytest
from packaging.requirements import Requirement
from support.checkpoints.tiny import make_tiny_tokenizer

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
IMAGE = ROOT / "tests" / "data" / "gpu_image.txt"
TRAVELS = 64 << 20  # bytes of a working tree and its wheels


def _name(text: str) -> str:
    return re.sub("[-_.]+", "-", text).lower()


def _places(distribution: Distribution) -> Iterator[Path]:
    """What a distribution has below site-packages, packages as a whole if they are its own."""
    for file in distribution.files or ():
        if file.parts[0] != ".." and "__pycache__" not in file.parts:
            yield Path(*file.parts[: 2 if file.parts[0] == "google" else 1])


def _in_the_image() -> Iterator[Distribution]:
    """What the image has, as far as it is installed here, and what that needs here."""
    lines = (line for line in IMAGE.read_text().splitlines() if not line.startswith("#"))
    wanted = {_name(word) for line in lines for word in line.split()}
    installed = {_name(each.name): each for each in distributions()}
    seen = set[str]()
    while wanted - seen:
        name = (wanted - seen).pop()
        seen.add(name)
        if name in installed:
            yield installed[name]
            needs = map(Requirement, installed[name].requires or ())
            wanted |= {_name(n.name) for n in needs if n.marker is None or n.marker.evaluate()}


def make_image(folder: Path) -> Path:
    """An interpreter that imports what the image has, and no more."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for distribution in _in_the_image():
        root = Path(str(distribution.locate_file("")))
        for place in set(_places(distribution)):
            (site / place).parent.mkdir(exist_ok=True)
            if not (site / place).exists():
                (site / place).symlink_to(root / place)
    return folder / "bin" / "python"


def fetch_wheels(folder: Path, version: str) -> list[Path]:
    """Skips where the package index is not to be had."""
    command = [sys.executable, str(ROOT / "scripts/gpu_wheels"), str(folder)]
    env = os.environ | {"PYTHON_VERSION": version}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if "NewConnectionError" in done.stderr or "Max retries exceeded" in done.stderr:
        pytest.skip("no package index")
    assert done.returncode == 0, done.stderr
    return list(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What tells the script of the image and of the wheels."""
    folder = tmp_path_factory.mktemp("image")
    fetch_wheels(folder / "wheels", f"{sys.version_info[0]}.{sys.version_info[1]}")
    python = make_image(folder / "python")
    return {"PYTHON": str(python), "WHEELS": str(folder / "wheels")}


class DryRun:
    """Calls of the script, in folders of their own."""

    def __init__(self, folder: Path) -> None:
        self.out, self.pack, self.cache = folder / "out", folder / "pack.tgz", folder / "kernels"
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


@pytest.mark.timeout(300)  # of a package index
def test_wheels_fit_the_image_and_the_way_there(tmp_path: Path) -> None:
    """For Python 3.12, as the image has it."""
    wheels = fetch_wheels(tmp_path, "3.12")
    assert {"llguidance", "jsonschema"} <= {wheel.name.partition("-")[0] for wheel in wheels}
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    tree = sum((ROOT / name).stat().st_size for name in tracked if (ROOT / name).is_file())
    assert tree + sum(wheel.stat().st_size for wheel in wheels) < TRAVELS


def test_parts_of_a_call_have_the_time_that_they_may_take() -> None:
    text = (ROOT / "scripts/gpu_check").read_text()
    budget = int(re.search(r"BUDGET_S:-(\d+)", text)[1])  # type: ignore[index]
    limits = {name: int(seconds) for name, seconds in re.findall(r"\[([\w.-]+)\]=(\d+)", text)}
    calls = dict(re.findall(r"\b(first|second|third|fourth|fifth)=\(([\w ]+)\)", text))
    functions = dict(re.findall(r"^(\w+)\(\) \{(.*?)\}$", text, re.M | re.S))
    assert len(calls) == 5
    for name, parts in calls.items():
        body = "".join(functions[part] for part in parts.split())
        made = 90 * ('shaped "$qwen' in body) + 60 * ('shaped "$llama' in body)
        assert sum(limits[part] for part in parts.split()) + made <= budget, name


@pytest.mark.timeout(SECONDS + 100)
def test_what_the_image_and_the_wheels_have_is_enough(dry: DryRun, image: dict[str, str]) -> None:
    """Of all that is imported; every part runs in its turn below."""
    status, states = dry("versions", "engine", "probe", **image)
    assert (status, states) == (0, dict.fromkeys(("versions", "engine", "probe"), "ok"))
    without = dry.start("versions", **image | {"WHEELS": "/nonexistent"})
    assert "missing: llguidance" in without.communicate(timeout=SECONDS)[0]
    assert without.returncode == 2


@pytest.mark.timeout(SECONDS + 100)
@pytest.mark.rotates(3, turn=0)
def test_the_first_call_runs_whole(dry: DryRun, image: dict[str, str]) -> None:
    fared = dict.fromkeys(
        ("versions", "probe", "compile", "ops", "make-tiny-llama", "decode"), "ok"
    )
    assert dry("first", **image) == (0, fared)
    files = dry.packed()
    _are_there(files, [f"{name}.log" for name in fared])
    _are_there(files, ["summary.txt"])
    assert b"NVIDIA-SMI of a test" in files["versions.log"]
    assert _json(files, "versions.json")["versions"]["interpreted"] is True
    assert len(_json(files, "probe.json")["probe"]) == 4
    assert {line["op"] for line in _json(files, "ops.json")["ops"]} == {"rms_norm"}
    lines = _json(files, "decode.json")["decode"]
    assert [line.get("top_p") for line in lines] == [1.0, 1.0, 1.0, 0.9, None, None, None]
    assert [line.get("prompt") for line in lines[4:]] == [24, 700, None]
    assert lines[-1]["transformers"] is True


@pytest.mark.timeout(SECONDS + 100)
@pytest.mark.rotates(3, turn=1)
def test_the_second_and_third_call_run_whole(
    dry: DryRun, image: dict[str, str], tmp_path: Path
) -> None:
    parts = "engine", "make-tiny-llama", "recovery", "trace", "serve", "kernels"
    make_tiny_tokenizer(tmp_path, vocab=300, max_length=512).save_pretrained(tmp_path)
    fared = dict.fromkeys(parts, "ok")
    assert dry("second", "third", TOKENIZER=str(tmp_path), **image) == (0, fared)
    files = dry.packed()
    _are_there(files, ["trace.json.gz"])
    assert b"15 tests collected" in files["engine.log"]  # all, whatever the share
    assert b" passed" in files["kernels.log"]
    assert _json(files, "trace.json")["trace"]["steps"] > 0
    assert _json(files, "serve.json")["verdict"] == "equal"
    assert _json(files, "recovery.json")["recovery"]["tiny-llama"]["median_s"] > 0


@pytest.mark.timeout(SECONDS + 100)
@pytest.mark.rotates(3, turn=2)
def test_the_other_calls_run_whole(dry: DryRun, image: dict[str, str]) -> None:
    fared = dict.fromkeys(("long", "dependent", "ncu", "divergence", "hybrid", "sanitizer"), "ok")
    fared |= dict.fromkeys(("make-tiny-llama", "make-tiny-qwen3.5"), "ok")
    assert dry("fourth", "fifth", **image) == (0, fared | {"ranks": "one GPU only"})
    files = dry.packed()
    dependent = _json(files, "dependent.json")["dependent_launch"]
    assert [line["equal"] for line in dependent] == [True, True, True]
    assert [line.get("window") for line in dependent] == [None, 1, 4]
    divergence = _json(files, "divergence.json")["divergence"]
    assert divergence["with drafts and without"]["equal"] == 2
    assert [line.get("window") for line in _json(files, "hybrid.json")["decode"]] == [
        1,
        1,
        4,
        None,
        None,
    ]
    assert b'"op": "rms_norm"' in files["ncu.log"]


@pytest.mark.timeout(SECONDS)
def test_kernels_travel_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As machine code, in parts that are small enough; what is there is not compiled again."""
    monkeypatch.setattr(carry_kernels, "_PART", 4000)
    here, there, archive = (tmp_path / name for name in ("here", "there", "kernels"))
    _compile(here)
    made = {path.relative_to(here) for path in here.rglob("*.cubin")}
    assert made
    carry_kernels.pack(here, archive)
    parts = sorted(tmp_path.glob("kernels.*"))
    assert [part.name for part in parts][:2] == ["kernels.00", "kernels.01"]
    assert all(part.stat().st_size <= 4000 for part in parts)
    shutil.rmtree(here)
    carry_kernels.unpack(there, archive)
    _compile(there)
    assert {path.relative_to(there) for path in there.rglob("*.cubin")} == made
    assert not list(there.rglob("*.ptx"))
    parts[0].unlink()
    with pytest.raises(tarfile.TarError):
        carry_kernels.unpack(tmp_path / "nowhere", archive)


def _compile(cache: Path) -> None:
    """Some kernels, by the part of that name."""
    command = [
        str(ROOT / "tests/support/kernels/compile_all.sh"),
        sys.executable,
        "2",
        "--ops",
        "rms_norm",
    ]
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True, timeout=SECONDS)


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


def test_a_cache_that_is_broken_is_told_and_does_no_harm(
    dry: DryRun, image: dict[str, str]
) -> None:
    broken = dry.cache.with_name("kernels.00")
    broken.write_bytes(b"no archive")
    process = dry.start("probe", **image)
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert "kernels is of no use" in said
    assert tarfile.is_tarfile(broken)
