"""The health check of containers, as they run it: what it says, and what it costs."""

from __future__ import annotations

import asyncio
import logging
import os
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

SUPERVISOR = pb.DESCRIPTOR.services_by_name["Supervisor"]


def check(*arguments: str, **environ: str) -> tuple[int, str]:
    """Exit status and what it says."""
    own = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        (sys.executable, "-m", "surestep_common.healthcheck", *arguments),
        env=os.environ | own | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


async def test_a_server_that_does_not_serve_lives() -> None:
    server = Server([SUPERVISOR])
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"

    async def said(*name: str) -> tuple[int, str]:
        return await asyncio.to_thread(check, address, *name)

    try:
        assert await said() == (1, "NOT_SERVING")
        assert await said(LIVE) == (0, "")
        await server.set_serving(True)
        assert await said() == (0, "")
        assert await said(SUPERVISOR.full_name) == (0, "")
        assert await said("nobody") == (1, "NOT_FOUND")
        await server.set_serving(False)
        assert await said() == (1, "NOT_SERVING")
        assert await said(LIVE) == (0, "")
    finally:
        await server.stop(0)
    assert await said(LIVE) == (1, "UNAVAILABLE")


@pytest.mark.parametrize("turns", range(0, 40, 2))
async def test_a_stop_that_is_cancelled_goes_on(turns: int) -> None:
    server = Server([SUPERVISOR])
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    stopping = asyncio.ensure_future(server.stop(0))
    for _ in range(turns):  # of the loop: somewhere among them gRPC itself waits
        await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait([stopping])
    await server.stop(0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address.split(":"))


async def test_calls_that_were_left_are_no_faults(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC logs with a traceback that a call was cancelled while it was told its error."""
    server = Server([SUPERVISOR])
    for error in (asyncio.CancelledError("left"), RuntimeError("ours")):
        logging.getLogger("grpc._cython.cygrpc").error("not handled", exc_info=error)
    await server.stop(0)
    assert ("left" in caplog.text, "ours" in caplog.text) == (False, True)


@pytest.mark.rotates(1)
def test_a_service_that_hangs_is_not_waited_for() -> None:
    with socket.socket() as hanging:  # connections are accepted by the kernel alone
        hanging.bind(("127.0.0.1", 0))
        hanging.listen()
        address = f"127.0.0.1:{hanging.getsockname()[1]}"
        assert check(address)[1] in ("DEADLINE_EXCEEDED", "UNAVAILABLE")
        assert check(f"http://{address}/health") == (1, "timed out")


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
            """Pass over a handshake in plain text."""

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


def test_pages_are_asked_for_their_status() -> None:
    with pages() as address:
        assert check(f"http://{address}/200") == (0, "")
        assert check(f"http://{address}/503") == (1, '{"status": "no scheduler"}')
    assert "refused" in check(f"http://{address}/200")[1]


def test_what_speaks_https_alone_is_asked_so() -> None:
    """The image's check cannot know how the gateway was set up."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("example.org").configure_cert(context)
    with pages(context) as address:
        for scheme in ("http", "https"):
            assert check(f"{scheme}://{address}/200") == (0, "")
            assert check(f"{scheme}://{address}/503") == (1, '{"status": "no scheduler"}')


async def test_tls_of_services_is_as_the_settings_say(tmp_path: Path) -> None:
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
        in_file = tmp_path / "settings.yaml"
        in_file.write_text("".join(f"{name}: {path}\n" for name, path in settings.items()))
        for said_by in (environ, {"SURESTEP_CONFIG": str(in_file)}):
            assert await asyncio.to_thread(check, address, LIVE, **said_by) == (0, "")
            assert (await asyncio.to_thread(check, address, **said_by))[1] == "NOT_SERVING"
        assert (await asyncio.to_thread(check, address, LIVE))[0] == 1
    finally:
        tls.current.reset(token)
        await server.stop(0)


@pytest.mark.parametrize(
    ("target", "unneeded"),
    [("127.0.0.1:1", ("pydantic", "yaml")), ("http://127.0.0.1:1/", ("pydantic", "yaml", "grpc"))],
)
def test_nothing_is_imported_that_a_check_does_not_need(
    target: str, unneeded: tuple[str, ...]
) -> None:
    """It is started again and again: the settings alone would take twice as long as all else."""
    done = subprocess.run(
        (sys.executable, "-X", "importtime", "-m", "surestep_common.healthcheck", target),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "surestep_common" in imported
    assert imported.isdisjoint(unneeded)
