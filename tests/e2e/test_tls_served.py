"""`surestep serve` with mutual TLS between its processes."""

from __future__ import annotations

from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from e2e.conftest import FLAGS
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.processes.stack import serve


@pytest.mark.timeout(180)
def test_services_speak_tls(tiny_model: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("surestep.internal")
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    issued.cert_chain_pems[0].write_to_path(str(cert))
    issued.private_key_pem.write_to_path(str(key))
    authority.cert_pem.write_to_path(str(ca))
    flags = (
        *("--grpc-tls-cert", str(cert), "--grpc-tls-key", str(key), "--grpc-tls-ca", str(ca)),
        *("--grpc-tls-server-name", "surestep.internal"),
    )
    with serve(tiny_model, tmp_path / "logs", *FLAGS, *flags) as stack:
        body = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(stack.url + "/v1/completions", json=body, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 4
        scheduler = stack.scheduler()
        addresses = [scheduler["address"], scheduler["supervisors"][0]["address"]]
        addresses.append(scheduler["supervisors"][0]["rank_address"])
        for address in addresses:
            with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
                health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=5
                )
