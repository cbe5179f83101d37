"""Ranks that come, go and come back still find each other, and never a group that is over."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support.processes.ports import free_address
from surestep_worker.distributed.rendezvous import join_group
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

TIMEOUT_S = 20.0


def take_seat(address: str, rank: int) -> None:
    """As a rank does that dies right after."""
    host, _, port = address.rpartition(":")
    TCPStore(host, int(port), is_master=False, wait_for_workers=False).add(f"seat/{rank}", 1)


def gather(threads: ThreadPoolExecutor, address: str, *ranks: int) -> list[Future[Store]]:
    return [threads.submit(join_group, rank, 3, address, TIMEOUT_S) for rank in ranks]


def test_a_rank_that_comes_back_before_the_group_is_complete() -> None:
    address = free_address()
    with ThreadPoolExecutor(3) as threads:
        zero = gather(threads, address, 0)
        take_seat(address, 1)
        began = time.monotonic()
        stores = [meeting.result(TIMEOUT_S) for meeting in [*zero, *gather(threads, address, 1, 2)]]
        assert time.monotonic() - began < TIMEOUT_S / 2
    assert len(stores) == 3


def test_a_group_that_is_over_is_not_joined() -> None:
    address = free_address()
    with ThreadPoolExecutor(3) as threads:
        old = [meeting.result(TIMEOUT_S) for meeting in gather(threads, address, 0, 1, 2)]
        early = threads.submit(join_group, 1, 3, address, TIMEOUT_S)
        with pytest.raises(TimeoutError):
            early.result(0.5)  # rank 0 serves the old store still
        old.clear()
        stores = [early, *gather(threads, address, 0, 2)]
        assert [store.result(TIMEOUT_S) for store in stores]


def test_nobody_waits_longer_than_told() -> None:
    began = time.monotonic()
    with pytest.raises((DistError, RuntimeError)):
        join_group(1, 2, free_address(), 1.0)
    with pytest.raises(RuntimeError, match="missing"):
        join_group(0, 2, free_address(), 0.5)
    assert time.monotonic() - began < 20
