"""The programs of examples/grpc, as a reader would start them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console
from support.fakes.model import FakeModel
from support.fakes.scheduler import emulating, running
from support.fakes.worker import fake_worker
from support.processes.ports import free_address
from support.processes.scheduler_harness import make_settings
from surestep_cli.commands import Proto
from surestep_common.errors import Unavailable
from surestep_proto.sampling_pb2 import SamplingParams
from surestep_proto.scheduler_pb2 import GenerateChunk, GenerateRequest, ResolvedParams
from surestep_scheduler import server

EXAMPLES = Path(__file__).parents[2] / "examples" / "grpc"
PROMPT = ["5", "6", "7"]
Program = tuple[list[str], Path | None]  # command line, and a folder of modules that comes first


@pytest.fixture(scope="module")
def protos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that `surestep proto FOLDER` writes."""
    folder = tmp_path_factory.mktemp("protos")
    Proto(folder=folder).run(Console())
    return folder


def package_client(protos: Path, scratch: Path) -> Program:
    return [sys.executable, str(EXAMPLES / "package_client.py")], None


def generated_stubs(protos: Path, scratch: Path) -> Program:
    """With freshly generated code in front of ours."""
    compiler = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(protos)]
    outputs = [f"--python_out={scratch}", f"--grpc_python_out={scratch}"]
    files = map(str, (protos / "surestep_proto").glob("*.proto"))
    subprocess.run([*compiler, *outputs, *files], check=True)
    return [sys.executable, str(EXAMPLES / "generated_stubs.py")], scratch


def node(protos: Path, scratch: Path) -> Program:
    """Where Node and its packages are to be had."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node is not installed")
    for file in (EXAMPLES / "node").iterdir():
        shutil.copy(file, scratch)
    install = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund"]
    done = subprocess.run(install, cwd=scratch, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the packages cannot be installed: {done.stderr.strip()[-300:]}")
    return ["node", str(scratch / "stream.js"), str(protos)], None


@pytest.fixture(scope="module", params=[package_client, generated_stubs, node])
def program(
    request: pytest.FixtureRequest, protos: Path, tmp_path_factory: pytest.TempPathFactory
) -> Program:
    """A way to start each of them."""
    made: Program = request.param(protos, tmp_path_factory.mktemp("program"))
    return made


async def ran(program: Program, address: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    command, first = program
    paths = [str(first), *sys.path] if first is not None else sys.path
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SURESTEP_")}
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    process = await asyncio.create_subprocess_exec(
        *command,
        address,
        *PROMPT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


@pytest.mark.rotates(1)
async def test_an_answer_of_a_real_scheduler(program: Program) -> None:
    address, model = free_address(), FakeModel()
    async with (
        fake_worker(model) as worker,
        server.running(make_settings([worker], scheduler_listen=address)),
    ):
        status, out, err = await ran(program, address)
    assert status == 0, err
    assert len(out.split()) == 24
    assert all(0 <= int(id_) < model.vocab_size for id_ in out.split())


@pytest.mark.rotates(1)
async def test_it_goes_on_after_losses(program: Program) -> None:
    cuts = [3, 0, 9]

    async def losing(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        left = cuts.pop(0) if cuts else 1 << 30
        if request.HasField("resolved"):
            assert request.resolved == ResolvedParams(seed=1 << 63, max_tokens=24)
            request.sampling.seed = request.resolved.seed
        else:
            request.sampling.seed = 1 << 63
        async for chunk in emulating(request):
            if not left:
                raise Unavailable("draining")
            left -= 1
            if chunk.HasField("start"):
                chunk.start.model_fingerprint = "a"
                chunk.start.resolved.CopyFrom(ResolvedParams(seed=1 << 63, max_tokens=24))
            yield chunk

    async with running(script=losing) as fake:
        status, out, err = await ran(program, f"127.0.0.1:{fake.port}")
        first, *others = fake.requests
        assert status == 0, err
        assert len(others) == 3
        assert first.sampling.HasField("temperature")
        assert [request.model_fingerprint for request in others] == ["a"] * 3
        assert [len(request.emitted_ids) for request in others] == [2, 2, 10]
        whole = GenerateRequest(
            prompt_ids=[5, 6, 7], max_tokens=24, sampling=SamplingParams(seed=1 << 63)
        )
        quiet = [id_ async for chunk in emulating(whole) for id_ in chunk.token_ids]
    assert [int(id_) for id_ in out.split()] == quiet


@pytest.mark.rotates(1)
async def test_errors_are_told_by_name(program: Program) -> None:
    address = free_address()
    async with (
        fake_worker(FakeModel(vocab_size=6)) as worker,
        server.running(make_settings([worker], scheduler_listen=address)),
    ):
        status, out, err = await ran(program, address)
    assert (status, out.strip()) == (1, "")
    assert "INVALID" in err.upper()
    assert "prompt_ids" in err
