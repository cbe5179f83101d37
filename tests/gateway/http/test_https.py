"""The gateway over HTTPS, and the launcher's own question to it."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import trustme
from pydantic import ValidationError
from support.processes.gateway_stack import StartStack
from surestep_cli.api.http import call
from surestep_gateway.settings.config import GatewaySettings


class Files(NamedTuple):
    """Certificate and key."""

    cert: Path
    key: Path


def issue(folder: Path, name: str) -> Files:
    folder.mkdir()
    issued = trustme.CA().issue_cert(name)
    files = Files(folder / "cert.pem", folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(str(files.cert))
    issued.private_key_pem.write_to_path(str(files.key))
    return files


async def test_https_only(start_stack: StartStack, tmp_path: Path) -> None:
    ours, other = issue(tmp_path / "ours", "example.org"), issue(tmp_path / "other", "example.org")
    stack = await start_stack(ssl_certfile=ours.cert, ssl_keyfile=ours.key)
    url = f"https://{stack.server.address}"
    assert stack.server.url == url
    unchecked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    async with httpx.AsyncClient(base_url=url, verify=unchecked) as client:
        answer = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
    with pytest.raises(httpx.TransportError):
        await stack.client.get("/health")
    ready = f"{url}/health/ready"
    # The launcher knows the certificate, whoever signed it and whatever name is in it.
    assert (await asyncio.to_thread(call, ready, certificate=ours.cert)).status == 200
    for wrong in (None, other.cert):
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.to_thread(call, ready, certificate=wrong)


async def test_a_renewed_certificate_is_used(
    start_stack: StartStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By new connections, as soon as both files fit together; the old one serves until then."""
    ours, later = issue(tmp_path / "ours", "example.org"), issue(tmp_path / "later", "example.org")
    first, then = ours.cert.read_text(), later.cert.read_text()
    stack = await start_stack(ssl_certfile=ours.cert, ssl_keyfile=ours.key, enable_ssl_refresh=True)
    host, _, port = stack.server.address.rpartition(":")

    async def shown() -> str:
        pem = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)), timeout=10)
        return pem.strip()

    assert await shown() in first
    ours.cert.write_text(then)  # half of the pair
    async with asyncio.timeout(20):
        while "is not used yet" not in caplog.text:
            await asyncio.sleep(0.05)
    assert await shown() in first
    ours.key.write_text(later.key.read_text())
    async with asyncio.timeout(20):
        while await shown() not in then:
            await asyncio.sleep(0.05)


def test_a_certificate_needs_its_key(model: Path) -> None:
    with pytest.raises(ValidationError, match="need each other"):
        GatewaySettings.model_validate({"model": model, "ssl_certfile": Path(__file__)})
