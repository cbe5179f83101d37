"""Wheels: built, installed where there is no compiler, and serving with the kernels inside."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from email import message_from_string
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest
from repo.source import ROOT, tracked
from support.checkpoints.tiny import make_tiny_checkpoint
from support.kernels.ahead import compiled_ahead
from support.processes.ports import free_port
from surestep_cli.serve.serving import running
from surestep_kernels.columns.cpu.compiling import processor_features
from surestep_kernels.columns.cpu.prebuilt import fitting

pytest.importorskip("setuptools", "77", "the environment has no setuptools that builds wheels")
pytestmark = [  # the kernels may have to be compiled first
    pytest.mark.timeout(400),
    pytest.mark.rotates(1, turn=0),
]
MACHINE = platform.machine()
START_S = 60.0


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels that scripts/wheels makes, of one library that runs here."""
    folder = tmp_path_factory.mktemp("dist")
    (folder / "kernels").mkdir()
    best = fitting(MACHINE, set(processor_features().split()))[0]
    shutil.copy(compiled_ahead(best), folder / "kernels")
    variables = {"OUT": str(folder), "KERNELS": str(folder / "kernels"), "PYTHON": sys.executable}
    command = [str(ROOT / "scripts" / "wheels"), MACHINE]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a fresh environment with the wheel; what it requires is ours."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    subprocess.run([*pip, "-q", "--no-index", "--no-deps", wheel], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def within(programs: Path, folder: Path, *words: str | Path) -> list[str]:
    """Return a command that finds the environment's programs, and no others."""
    variables = {"PATH": programs, "HOME": folder, "SURESTEP_DEVICE": "cpu", "TMPDIR": folder}
    env = [f"{name}={value}" for name, value in variables.items()]
    return ["/usr/bin/env", "-i", *env, *map(str, (programs / "surestep", *words))]


def test_the_tag_is_that_of_what_the_library_needs(wheel: Path) -> None:
    libraries = [name for name in ZipFile(wheel).namelist() if name.endswith(".so")]
    assert len(libraries) == 1
    code = wheel.with_suffix(".so")
    code.write_bytes(ZipFile(wheel).read(libraries[0]))
    shown = subprocess.run(["readelf", "-VW", code], capture_output=True, text=True, check=True)
    newest = max(int(minor) for minor in re.findall(r"Name: GLIBC_2\.(\d+)", shown.stdout))
    assert wheel.name == f"surestep-0.1.0-py3-none-manylinux_2_{newest}_{MACHINE}.whl"
    (about,) = (name for name in ZipFile(wheel).namelist() if name.endswith("/WHEEL"))
    assert "Root-Is-Purelib: false" in ZipFile(wheel).read(about).decode()


def test_the_sdist_has_all_sources_and_nothing_compiled(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert not [name for name in names if name.endswith(".so")]
    product = re.compile(
        r"(proto|common|kernels|gateway|\w+_svc|cli|client)/.*|setup\.py|README\.md"
    )
    assert {name for name in tracked() if product.fullmatch(name)} - names == set()


def metadata(wheel: Path) -> Message:
    (about,) = (name for name in ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    return message_from_string(ZipFile(wheel).read(about).decode())


def test_the_plain_name_serves_and_extras_are_optional(wheel: Path) -> None:
    about = metadata(wheel)
    needed = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {"torch", "transformers", "starlette"} <= {re.split(r"\W", line)[0] for line in needed}
    assert "serve" in about.get_all("Provides-Extra", [])  # as earlier releases called it
    assert [line for line in about.get_all("Requires-Dist", []) if 'extra == "serve"' in line] == []


def test_the_readme_of_an_index_has_no_link_into_the_repository(wheel: Path) -> None:
    text = str(metadata(wheel).get_payload())
    assert "pip install surestep" in text
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert targets
    assert [target for target in targets if "://" not in target] == []


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (None, "[x](https://x.y) page"),
        ("https://h/o/", "[x](https://x.y) [page](https://h/o/blob/main/docs/a.md#b)"),
    ],
)
def test_relative_links_lead_into_the_source_that_a_publisher_names(
    source: str | None, shown: str
) -> None:
    readme = runpy.run_path(str(ROOT / "setup.py"))["readme"]
    text = readme("[x](https://x.y) [page](docs/a.md#b) ![shot](docs/b.png)", source)
    assert text.startswith(shown)
    assert ("![shot](https://h/o/raw/main/docs/b.png)" in text) == (source is not None)


@asynccontextmanager
async def chats(command: Sequence[str], port: int, log: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a server when it is ready."""
    url = f"http://127.0.0.1:{port}"
    async with running(command, log) as process, httpx.AsyncClient(base_url=url) as client:
        async with asyncio.timeout(START_S):
            while not await is_ready(client):
                assert process.poll() is None, log.read_text()
                await asyncio.sleep(0.1)
        yield client


async def is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health/ready")).status_code == 200
    except httpx.TransportError:
        return False


def served_with(programs: Path, folder: Path, *flags: str) -> str:
    """Return what the services log of a server that answers one chat."""
    model = make_tiny_checkpoint(folder / "tiny", tokenizer=True)
    port, log, logs = free_port(), folder / "console", folder / "logs"
    words = ["serve", str(model), "--port", str(port), "--log-dir", str(logs), *flags]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}

    async def chat() -> httpx.Response:
        async with chats(within(programs, folder, *words), port, log) as client:
            return await client.post("/v1/chat/completions", json=body, timeout=START_S)

    reply = asyncio.run(chat())
    assert reply.json()["usage"]["completion_tokens"] > 0
    return "".join(file.read_text() for file in logs.rglob("*.log"))


def test_a_fresh_environment_without_a_compiler_serves(programs: Path, tmp_path: Path) -> None:
    said = served_with(programs, tmp_path)
    assert "C kernels compiled ahead for" in said
    assert "kernels for cpu: C" in said


def test_without_its_kernels_it_serves_only_where_it_may_be_slow(
    programs: Path, tmp_path: Path
) -> None:
    """Last: the environment has none from here on."""
    (kernels,) = programs.parent.glob("lib/*/site-packages/surestep_kernels/columns/cpu/prebuilt")
    shutil.rmtree(kernels)
    said = served_with(programs, tmp_path, "--allow-slow")
    assert "kernels for cpu: torch reference" in said
    command = within(programs, tmp_path, "serve", tmp_path / "tiny", "--port", str(free_port()))
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 2
    assert (
        "rank 0 cannot start: no C kernels: no C compiler (cc), and no kernels were compiled ahead: "
        "install gcc; --allow-slow serves without them"
    ) in done.stderr
