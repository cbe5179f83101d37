"""The interface that leads to a peer: one that has the address by which the peer sees this host."""

from __future__ import annotations

import socket

import psutil
import pytest
from surestep_worker.host.network import interface_towards


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback(host: str) -> None:
    assert interface_towards(f"{host}:1") == "lo"


def test_each_address_of_this_host_is_on_its_interface() -> None:
    found = {
        (name, interface_towards(f"{one.address}:1"))
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET
    }
    assert found  # the kernel takes its own addresses for local: by the interface that has them
    assert all(name == towards for name, towards in found)


def test_a_name_that_leads_nowhere() -> None:
    assert interface_towards("nobody.invalid:1") is None
