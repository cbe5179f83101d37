"""The health check of the images: what it says, what it costs, and when it hands over to Python."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import trustme
from surestep_common import tls
from surestep_common.rpc import LIVE, Server
from surestep_common.tls import TlsSettings
from surestep_proto import supervisor_pb2 as pb

SOURCE = Path(__file__).resolve().parents[3] / "deploy" / "docker" / "health.c"
SUPERVISOR = pb.DESCRIPTOR.services_by_name["Supervisor"]
MOST_CPU_S = 0.005  # of one check

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("probe") / "surestep-health"
    flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["cc", *flags, "-o", str(program), str(SOURCE)], check=True)
    return program


def check(probe: Path, *arguments: str, **environ: str) -> tuple[int, str]:
    """Exit status and what it says."""
    python = str(Path(sys.executable).parent)  # where `python` is ours
    own = {"PATH": f"{python}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        (str(probe), *arguments),
        env=os.environ | own | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


async def test_a_grpc_service_is_asked_what_python_asks(probe: Path) -> None:
    server = Server([SUPERVISOR])
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"

    async def said(*name: str) -> tuple[int, str]:
        return await asyncio.to_thread(check, probe, address, *name, PATH="/nowhere")

    try:
        assert await said() == (1, "NOT_SERVING")
        assert await said(LIVE) == (0, "")
        await server.set_serving(True)
        assert await said() == (0, "")
        assert await said(SUPERVISOR.full_name) == (0, "")
        assert (await said("nobody"))[0] == 1
    finally:
        await server.stop(0)
    assert await said(LIVE) == (1, "Connection refused")


async def test_a_check_costs_next_to_nothing(probe: Path) -> None:
    server = Server([SUPERVISOR])
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"

    def cpu_s(checks: int = 20) -> float:
        def spent() -> float:
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            return usage.ru_utime + usage.ru_stime

        before = spent()
        for _ in range(checks):
            subprocess.run((str(probe), address, LIVE), check=True)
        return (spent() - before) / checks

    try:
        assert await asyncio.to_thread(cpu_s) < MOST_CPU_S
    finally:
        await server.stop(0)


def test_a_service_that_hangs_is_not_waited_for(probe: Path) -> None:
    with socket.socket() as hanging:  # connections are accepted by the kernel alone
        hanging.bind(("127.0.0.1", 0))
        hanging.listen()
        address = f"127.0.0.1:{hanging.getsockname()[1]}"
        assert check(probe, address) == (1, "no answer")
        assert check(probe, f"http://{address}/health") == (1, "no answer")


@contextmanager
def pages(context: ssl.SSLContext | None = None) -> Iterator[str]:
    """host:port of an HTTP server whose /N answers with status N."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"status": "no scheduler"}'
            self.send_response(int(self.path[1:]))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Pages(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Of a handshake in plain text."""

    with Pages(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_pages_are_asked_for_their_status(probe: Path) -> None:
    with pages() as address:
        assert check(probe, f"http://{address}/200", PATH="/nowhere") == (0, "")
        assert check(probe, f"http://{address}/503") == (1, '{"status": "no scheduler"}')
    assert check(probe, f"http://{address}/200") == (1, "Connection refused")


def test_https_is_left_to_python(probe: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("example.org").configure_cert(context)
    with pages(context) as address:
        assert check(probe, f"http://{address}/200") == (0, "")
        assert check(probe, f"http://{address}/503") == (1, '{"status": "no scheduler"}')


async def test_tls_of_services_is_left_to_python(probe: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    files = {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "ca")}
    issued.cert_chain_pems[0].write_to_path(str(files["cert"]))
    issued.private_key_pem.write_to_path(str(files["key"]))
    authority.cert_pem.write_to_path(str(files["ca"]))
    settings = {f"grpc_tls_{name}": path for name, path in files.items()}
    token = tls.current.set(None)
    tls.use(TlsSettings.model_validate(settings))
    server = Server([SUPERVISOR])
    try:
        address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
        environ = {f"SURESTEP_{name.upper()}": str(path) for name, path in settings.items()}
        assert await asyncio.to_thread(check, probe, address, LIVE, **environ) == (0, "")
        assert (await asyncio.to_thread(check, probe, address, "", **environ))[1] == "NOT_SERVING"
        assert (await asyncio.to_thread(check, probe, address, LIVE))[0] == 1
    finally:
        tls.current.reset(token)
        await server.stop(0)


@pytest.mark.parametrize("arguments", [(), ("a", "b", "c")])
def test_it_says_how_it_is_used(probe: Path, arguments: tuple[str, ...]) -> None:
    done = subprocess.run((str(probe), *arguments), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: surestep-health")
