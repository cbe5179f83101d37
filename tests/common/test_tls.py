"""TLS between services: real handshakes with certificates made here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from surestep_common import rpc, tls
from surestep_common.healthcheck import trouble
from surestep_common.tls import TlsSettings


class Authority:
    """A CA, and settings of processes whose certificates it has signed."""

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self._folder = folder
        folder.mkdir()
        self._ca.cert_pem.write_to_path(str(folder / "ca.pem"))

    def settings(self, name: str = "127.0.0.1", **changes: object) -> TlsSettings:
        issued = self._ca.issue_cert(name)
        issued.private_key_pem.write_to_path(str(self._folder / f"{name}.key"))
        issued.cert_chain_pems[0].write_to_path(str(self._folder / f"{name}.pem"))
        files = {
            "grpc_tls_cert": self._folder / f"{name}.pem",
            "grpc_tls_key": self._folder / f"{name}.key",
            "grpc_tls_ca": self._folder / "ca.pem",
        }
        return TlsSettings.model_validate(files | changes)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@contextlib.contextmanager
def using(settings: TlsSettings | None) -> Iterator[None]:
    """As in a process with these settings; None = plaintext."""
    token = tls.current.set(None)
    if settings is not None:
        tls.use(settings)
    try:
        yield
    finally:
        tls.current.reset(token)


@contextlib.asynccontextmanager
async def serving(settings: TlsSettings | None) -> AsyncIterator[str]:
    """Address of a server with these settings."""
    with using(settings):
        server = rpc.Server([])
        port = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def reaches(address: str, settings: TlsSettings | None) -> bool:
    """Whether a process with these settings gets an answer."""
    with using(settings):
        channel = rpc.connect(address)
    async with channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=5
            )
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
        return True


async def test_both_show_certificates(ours: Authority) -> None:
    async with serving(ours.settings()) as address:
        assert await reaches(address, ours.settings())


async def test_plaintext_is_refused_both_ways(ours: Authority) -> None:
    async with serving(ours.settings()) as address:
        assert not await reaches(address, None)
    async with serving(None) as address:
        assert not await reaches(address, ours.settings())


async def test_another_authority_is_refused_both_ways(ours: Authority, tmp_path: Path) -> None:
    theirs = Authority(tmp_path / "theirs")
    async with serving(ours.settings()) as address:
        assert not await reaches(address, theirs.settings())
        # They believe us, but we do not believe them.
        gullible = theirs.settings(grpc_tls_ca=tmp_path / "ours" / "ca.pem")
        assert not await reaches(address, gullible)


async def test_a_client_without_a_certificate_is_refused(ours: Authority) -> None:
    async with serving(ours.settings()) as address:
        root = ours.settings().grpc_tls_ca
        assert root is not None
        credentials = grpc.ssl_channel_credentials(root.read_bytes())
        async with grpc.aio.secure_channel(address, credentials) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=5
                )


async def test_names_count_unless_another_is_expected(ours: Authority) -> None:
    async with serving(ours.settings("scheduler.internal")) as address:
        assert not await reaches(address, ours.settings())
        expecting = ours.settings(grpc_tls_server_name="scheduler.internal")
        assert await reaches(address, expecting)


async def test_the_health_check_speaks_it(ours: Authority) -> None:
    async with serving(ours.settings()) as address:
        with using(ours.settings()):
            assert await asyncio.to_thread(trouble, address, "", tls.current.get()) is None
        assert await asyncio.to_thread(trouble, address)


def test_half_a_certificate_is_refused(ours: Authority) -> None:
    with pytest.raises(ValueError, match="need each other"):
        ours.settings(grpc_tls_key=None)
    with pytest.raises(ValueError, match="needs --grpc-tls-cert"):
        ours.settings(grpc_tls_key=None, grpc_tls_cert=None)


def test_missing_files_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        TlsSettings.load(["--grpc-tls-cert", "/nowhere.pem", "--grpc-tls-key", "/nowhere.key"])
    assert "--grpc-tls-cert or SURESTEP_GRPC_TLS_CERT" in capsys.readouterr().err
