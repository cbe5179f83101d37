"""Addresses that cannot be had are told before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from surestep_cli.serve.ports import check_address, check_services, check_socket
from surestep_common.errors import Unavailable


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(Unavailable, match=f"port {port} of 127.0.0.1 is taken"):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", 0)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_no_port_that_is_taken(host: str) -> None:
    with pytest.raises(Unavailable, match=f"^cannot listen on port 1234 of {host}: "):
        check_address(host, 1234)


def test_a_socket_of_another_server_is_not_taken_for_ours(tmp_path: Path) -> None:
    """Whose readiness would be announced as this server's."""
    path = tmp_path / "s.sock"
    check_socket(path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        check_socket(path)  # nobody listens
        other.listen()
        with pytest.raises(Unavailable, match=r"s\.sock is taken"):
            check_socket(path)
        with pytest.raises(Unavailable, match=r"cannot listen on /.*s\.sock: another process does"):
            check_services([f"unix:{path}.free", f"unix:{path}"])
    check_socket(path)
    check_services([f"unix:{path}"])


def test_a_service_of_another_server_is_not_taken_for_ours() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{other.getsockname()[1]}"
        check_services(["127.0.0.1:0", "no.such.host.invalid:1234"])  # a service says that itself
        other.listen()
        with pytest.raises(Unavailable, match=f"cannot listen on {address}: another process does"):
            check_services([address])
