"""`python -m surestep_common.healthcheck host:port|http://...`: for containers; 0 = healthy.

A gRPC address is asked for its overall health, a URL for any answer below 400. TLS as the settings
in the environment say.
"""

from __future__ import annotations

import sys
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from . import tls

_TIMEOUT_S = 3.0


def is_healthy(target: str) -> bool:
    """Whether the service behind `target` says that it serves."""
    return _http(target) if target.startswith("http") else _grpc(target)


def _grpc(address: str) -> bool:
    with _channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S
            )
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def _channel(address: str) -> grpc.Channel:
    files = tls.current.get()
    if files is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, files.channel_credentials(), files.channel_options())


def _http(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S):  # noqa: S310
            return True
    except OSError:
        return False


if __name__ == "__main__":
    tls.use(tls.TlsSettings.load([]))
    sys.exit(not is_healthy(sys.argv[1]))
