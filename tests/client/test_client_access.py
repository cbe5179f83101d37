"""Keys and certificates of surestep.client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from support.clients.calls import Generate, whole
from support.fakes.model import FakeModel
from support.fakes.scheduler import running
from support.fakes.worker import fake_worker
from support.processes.ports import free_address
from support.processes.scheduler_harness import make_settings
from surestep.client import Tls
from surestep_common import access, tls
from surestep_common.errors import InvalidRequest, Unauthenticated, Unavailable
from surestep_common.tls import TlsSettings
from surestep_scheduler import server

NAME = "scheduler.example"


@contextlib.contextmanager
def secret(value: str) -> Iterator[None]:
    """Servers made here know it; calls of other code do not show it."""
    token = access.secret.set(value)
    try:
        yield
    finally:
        access.secret.reset(token)


async def test_keys_of_guests(generate: Generate) -> None:
    address = free_address()
    with secret("s" * 32):
        async with fake_worker(FakeModel()) as worker:
            settings = make_settings(
                [worker],
                scheduler_listen=address,
                grpc_secret="s" * 32,
                grpc_api_key=["a guest's key"],
            )
            async with server.running(settings):
                with pytest.raises(Unauthenticated):
                    await generate(address)
                with pytest.raises(Unauthenticated):
                    await generate(address, api_key="another one")
                completion = await generate(address, api_key="a guest's key", max_tokens=3)
    assert len(completion.token_ids) == 3


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "127.0.0.1", ":50051", "host:port", ""])
async def test_an_address_that_is_none_is_not_called(generate: Generate, address: str) -> None:
    with pytest.raises(InvalidRequest, match="host:port") as raised:
        await generate(address)
    assert raised.value.param == "address"


@pytest.mark.parametrize("key", ["from a file\n", "Schlüssel"])
async def test_a_key_that_cannot_be_sent_is_not_tried_again(generate: Generate, key: str) -> None:
    with pytest.raises(InvalidRequest, match="one line") as raised:
        await generate("127.0.0.1:1", api_key=key)
    assert raised.value.param == "api_key"


async def test_certificates(generate: Generate, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert(NAME)
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(str(files["ca"]))
    issued.private_key_pem.write_to_path(str(files["key"]))
    issued.cert_chain_pems[0].write_to_path(str(files["cert"]))
    token = tls.current.set(None)
    tls.use(
        TlsSettings(grpc_tls_cert=files["cert"], grpc_tls_key=files["key"], grpc_tls_ca=files["ca"])
    )
    try:
        async with running() as fake:
            tls.current.set(None)
            named = Tls(ca=files["ca"], cert=files["cert"], key=files["key"], server_name=NAME)
            assert (await generate(fake, tls=named, max_tokens=3)).token_ids == whole(3)
            nobody = Tls(ca=files["ca"], server_name=NAME)  # shows no certificate of its own
            unknown = Tls(cert=files["cert"], key=files["key"], server_name=NAME)  # asks the system
            other = Tls(ca=files["ca"], cert=files["cert"], key=files["key"])  # by another name
            for wrong in (None, nobody, unknown, other):
                with pytest.raises(Unavailable):
                    await generate(fake, tls=wrong, retry_for_s=0)
    finally:
        tls.current.reset(token)
    with pytest.raises(OSError, match="nowhere"):
        await generate(fake, tls=Tls(ca=tmp_path / "nowhere"))
