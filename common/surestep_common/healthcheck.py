"""`python -m surestep_common.healthcheck host:port [NAME]|http://...`: for containers; 0 = healthy.

A gRPC address is asked for its overall health, or that of NAME (`live`: it answers at all), a URL
for any answer below 400. Says what is wrong, which container engines keep beside the status. TLS of
gRPC as the settings in the environment say; of HTTPS any certificate will do, for it names a host
that clients know, and not the address that is asked here.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from . import tls
from .other_releases import name_of

_TIMEOUT_S = 3.0
_MAX_BYTES = 4096  # of what a service says


def trouble(target: str, name: str = "") -> str | None:
    """Return what keeps the service behind `target` from serving; None if nothing does."""
    return _http(target) if target.startswith("http") else _grpc(target, name)


def _grpc(address: str, name: str) -> str | None:
    with _channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=name), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            return str(error.code().name)
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return name_of(health_pb2.HealthCheckResponse.ServingStatus, reply.status)


def _channel(address: str) -> grpc.Channel:
    files = tls.current.get()
    if files is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, files.channel_credentials(), files.channel_options())


def _http(url: str) -> str | None:
    try:
        anybody = tls.context_of_client(None, verify=False)
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S, context=anybody):  # noqa: S310
            return None
    except urllib.error.HTTPError as error:
        with error:
            return error.read(_MAX_BYTES).decode(errors="replace")
    except OSError as error:
        return str(error)


def main(target: str, name: str = "") -> int:
    """Exit status."""
    tls.use(tls.TlsSettings.load([]))
    said = trouble(target, name)
    sys.stdout.write("" if said is None else f"{said}\n")
    return int(said is not None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
