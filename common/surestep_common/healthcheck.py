"""`python -m surestep_common.healthcheck host:port [NAME]|http://...`: for containers; 0 = healthy.

A gRPC address is asked for its overall health, or that of NAME (`live`: it answers at all), a URL
for any answer below 400. Says what is wrong, which container engines keep beside the status. TLS of
gRPC as the settings in the environment say; of HTTPS any certificate will do, for it names a host
that clients know, and not the address that is asked here.

It runs every few seconds beside what serves: each way imports no more than it needs.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc

    from .tls import TlsCredentials

_TIMEOUT_S = 3.0
_MAX_BYTES = 4096  # of what a service says
_MAY_NAME_FILES = ("SURESTEP_GRPC_TLS_", "SURESTEP_CONFIG")  # variables, by their beginnings


def trouble(target: str, name: str = "", files: TlsCredentials | None = None) -> str | None:
    """Return what keeps the service behind `target` from serving; None if nothing does."""
    return _http(target) if target.startswith("http") else _grpc(target, name, files)


def _grpc(address: str, name: str, files: TlsCredentials | None) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from .releases import name_of

    with _channel(address, files) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=name), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            return str(error.code().name)
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return name_of(health_pb2.HealthCheckResponse.ServingStatus, reply.status)


def _channel(address: str, files: TlsCredentials | None) -> grpc.Channel:
    import grpc

    if files is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, files.channel_credentials(), files.channel_options())


def _http(url: str) -> str | None:
    import http.client
    import ssl
    import urllib.error
    import urllib.request

    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S, context=anybody):  # noqa: S310
            return None
    except urllib.error.HTTPError as error:
        with error:
            return error.read(_MAX_BYTES).decode(errors="replace")
    except (http.client.HTTPException, ConnectionResetError) as error:
        secure = url.replace("http://", "https://", 1)
        return _http(secure) if secure != url else str(error)  # it may speak TLS alone
    except OSError as error:
        return str(error)


def _files() -> TlsCredentials | None:
    """Return what the settings name; where none can, they are not read, which takes 0.2 s."""
    if not any(name.startswith(_MAY_NAME_FILES) and os.environ[name] for name in os.environ):
        return None
    from . import tls

    tls.use(tls.TlsSettings.load([]))
    return tls.current.get()


def main(target: str, name: str = "") -> int:
    """Exit status."""
    said = trouble(target, name, None if target.startswith("http") else _files())
    sys.stdout.write("" if said is None else f"{said}\n")
    return int(said is not None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
