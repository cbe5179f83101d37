"""The rendezvous of the ranks of a group: a key-value store that rank 0 serves.

Ranks die and come back one by one, so a rank may find the store of a group that has ended, or of
one that has lost a rank meanwhile. Each rank takes its seat, and a seat is taken once: a store in
which it was taken before belongs to another group. Rank 0 gives such a store up for a new one, the
other ranks wait for that. When all have their seats, rank 0 marks the group complete. A rank that
joins later shows that a rank of the group is gone, as does a missing store; the others find out
when they check.
"""

from __future__ import annotations

import time
from datetime import timedelta

from surestep_common import addresses
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

_RETRY_S = 0.02
_CONNECT_S = 2.0
_LOOK_S = 1.0
_COMPLETE = "complete"


def join_group(rank: int, size: int, address: str, timeout_s: float) -> Store:
    """Return the store of a new group whose `size` ranks have all joined; rank 0 listens at
    `address`.

    Raises DistError or RuntimeError if they do not join in time.
    """
    place = addresses.split(address)
    deadline = time.monotonic() + timeout_s
    attempt = _gather if rank == 0 else _join
    while True:
        try:
            store = attempt(*place, rank, size, deadline)
        except (DistError, RuntimeError):  # no store yet, or its rank 0 has gone
            if time.monotonic() > deadline:
                raise
            store = None
        if store is not None:
            return store
        time.sleep(_RETRY_S)


def find_missing_rank(store: Store, rank: int, size: int) -> str | None:
    """Return a rank of a complete group that is known to be gone, or None.

    Call it only while this rank does nothing else with the store.
    """
    usual = store.timeout  # type: ignore[attr-defined]  # the stubs forget it
    store.set_timeout(timedelta(seconds=_LOOK_S))
    try:
        if rank:
            store.check([_COMPLETE])
            return None
        again = [other for other in range(1, size) if store.add(_seat(other), 0) > 1]
    except (DistError, RuntimeError):
        return "rank 0"
    finally:
        store.set_timeout(usual)
    return f"rank {again[0]}" if again else None


def _gather(host: str, port: int, rank: int, size: int, deadline: float) -> Store | None:
    """Rank 0: serve a store until every seat is taken; None if one is taken twice."""
    store = TCPStore(host, port, is_master=True, wait_for_workers=False)
    while True:
        seats = [store.add(_seat(other), 0) for other in range(1, size)]
        if max(seats) > 1:
            return None
        if min(seats) == 1:
            store.set(_COMPLETE, "")
            return store
        if time.monotonic() > deadline:
            raise RuntimeError("a rank is missing")
        time.sleep(_RETRY_S)


def _join(host: str, port: int, rank: int, size: int, deadline: float) -> Store | None:
    """Other ranks: take the seat and wait until all are taken; None if it is not free."""
    store = TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_CONNECT_S),
    )
    if store.add(_seat(rank), 1) > 1:
        return None
    store.wait([_COMPLETE], timedelta(seconds=max(0.0, deadline - time.monotonic())))
    return store


def _seat(rank: int) -> str:
    return f"seat/{rank}"
