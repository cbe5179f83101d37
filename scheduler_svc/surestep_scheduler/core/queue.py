"""Fair queue: tenants, how much service each has received, and their requests that wait for a slot.

A tenant's counter is what it was given over its weight (virtual token counters: Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024). The smallest counter is next. A tenant
that begins to wait is lifted to the smallest of those that wait already, so that none saves up;
and to what each would have if all had been served alike, so that an endless row of new tenants
keeps none waiting for ever (the virtual time of Parekh and Gallager, "A Generalized Processor
Sharing Approach to Flow Control", 1993).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
from surestep_common.errors import QueueFull
from surestep_common.tenants import may_enter

from .limits import Limits
from .sequence import Sequence

OUTPUT_TOKEN = 2.0  # what a token that is emitted counts for, in tokens of a prompt

_REMEMBERED = 1024  # tenants without open requests whose counters are kept


@dataclass(slots=True, eq=False)
class ActiveTenant:
    """A tenant, while requests of it are open."""

    name: str
    index: int  # its place in columns by tenant
    weight: float
    served: float  # tokens over weight; what is computed again after a fault does not count
    num_open: int = 0
    num_running: int = 0

    def after(self, num_tokens: float) -> float:
        """Return its counter after so many tokens more."""
        return self.served + num_tokens / self.weight


class Tenants:
    """Tenants with open requests, by name."""

    def __init__(self) -> None:
        self.level = 0.0  # counter of a tenant that always got its share, no more and no less
        self._by_name: dict[str, ActiveTenant] = {}
        self._by_index: list[ActiveTenant | None] = []
        self._past: OrderedDict[str, float] = OrderedDict()  # counters, latest last

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[ActiveTenant]:
        return iter(self._by_name.values())

    def known(self, name: str) -> ActiveTenant | None:
        """Return the tenant if requests of it are open."""
        return self._by_name.get(name)

    def join(self, name: str, weight: float) -> ActiveTenant:
        """Open one more request of a tenant. The newest weight holds."""
        tenant = self._by_name.get(name)
        if tenant is None:
            index = self._free_index()
            tenant = ActiveTenant(name, index, weight, self._past.pop(name, 0.0))
            self._by_name[name] = self._by_index[index] = tenant
        tenant.weight = weight
        tenant.num_open += 1
        return tenant

    def _free_index(self) -> int:
        if None not in self._by_index:
            self._by_index.append(None)
        return self._by_index.index(None)

    def leave(self, tenant: ActiveTenant) -> None:
        """Close one request of a tenant."""
        tenant.num_open -= 1
        if tenant.num_open:
            return
        del self._by_name[tenant.name]
        self._by_index[tenant.index] = None
        self._past[tenant.name] = tenant.served
        while len(self._past) > _REMEMBERED:
            self._past.popitem(last=False)

    def charge(self, index: npt.NDArray[np.int64], tokens: npt.NDArray[np.float64]) -> None:
        """Charge the rows [R] of a plan, given the tenant of each and what it counts for."""
        sums = np.bincount(index, weights=tokens)
        self.level += float(sums.sum()) / sum(tenant.weight for tenant in self)
        for place in sums.nonzero()[0].tolist():
            tenant = self._by_index[place]
            assert tenant is not None
            tenant.served = tenant.after(float(sums[place]))

    def check(self) -> None:
        """Assert that the two indices agree. For tests."""
        assert [t for t in self._by_index if t is not None] == sorted(self, key=lambda t: t.index)
        assert all(tenant.num_open > 0 and tenant.weight > 0 for tenant in self)


_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0  # bounds on `retry_after`
_MEASURED = 64  # requests whose starts show how fast the queue drains


def _order(seq: Sequence) -> tuple[float, int]:
    return seq.order


class WaitingQueue:
    """Sorted by order within each tenant. Tokens are those known of each request."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_refused = 0  # requests that found no room
        self._seqs: dict[ActiveTenant, list[Sequence]] = {}  # of those that have any
        self._tokens: dict[ActiveTenant, int] = {}  # the same
        self._count = 0
        self._last_served = 0.0  # `served` of the tenant that waited last
        self._started: deque[tuple[float, int]] = deque(maxlen=_MEASURED)  # time, tokens

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over requests of all tenants in their order."""
        return heapq.merge(*self._seqs.values(), key=_order)

    @property
    def tenants(self) -> Mapping[ActiveTenant, list[Sequence]]:
        """Requests that wait, by tenant and in their order."""
        return self._seqs

    def tokens_of(self, tenant: ActiveTenant) -> int:
        """Return the tokens of the requests of a tenant that wait."""
        return self._tokens.get(tenant, 0)

    def add(self, seq: Sequence, level: float = 0.0) -> None:
        """Insert a request among those of its tenant; `level` is that of Tenants."""
        tenant = seq.tenant
        if tenant not in self._seqs:
            floor = min((other.served for other in self._seqs), default=self._last_served)
            tenant.served = max(tenant.served, floor, level)
            self._seqs[tenant], self._tokens[tenant] = [], 0
        insort(self._seqs[tenant], seq, key=_order)
        self._tokens[tenant] += len(seq.tokens)
        self.num_tokens += len(seq.tokens)
        self._count += 1

    def remove(self, seq: Sequence) -> None:
        """Take a request out of the queue."""
        tenant = seq.tenant
        seqs = self._seqs[tenant]
        found = seqs.pop(bisect_left(seqs, seq.order, key=_order))
        assert found is seq
        self._tokens[tenant] -= len(seq.tokens)
        self.num_tokens -= len(seq.tokens)
        self._count -= 1
        if not seqs:
            del self._seqs[tenant], self._tokens[tenant]
            self._last_served = tenant.served

    def first(
        self, count: int, allows: Callable[[str], bool], entitled: Mapping[ActiveTenant, int]
    ) -> list[Sequence]:
        """Return the next requests whose ids are allowed, at most `count`.

        Tenants that run fewer requests than they are entitled to come first, then those that have
        been served least, or wait longest; what was picked counts as served.
        """
        if not count:
            return []
        allowed = {t: filter(lambda seq: allows(seq.request.id), s) for t, s in self._seqs.items()}
        if len(allowed) == 1:
            (seqs,) = allowed.values()
            return list(islice(seqs, count))
        picked: list[Sequence] = []
        given = dict.fromkeys(allowed, 0)  # tokens
        number = {tenant: tenant.num_running for tenant in allowed}

        def place(tenant: ActiveTenant) -> tuple[bool, float, tuple[float, int], ActiveTenant]:
            above = number[tenant] >= entitled.get(tenant, 0)
            return above, tenant.after(given[tenant]), self._seqs[tenant][0].order, tenant

        heap = [place(tenant) for tenant in allowed]
        heapq.heapify(heap)
        while heap and len(picked) < count:
            *_, tenant = heapq.heappop(heap)
            seq = next(allowed[tenant], None)
            if seq is not None:
                picked.append(seq)
                number[tenant] += 1
                given[tenant] += len(seq.tokens)
                heapq.heappush(heap, place(tenant))
        return picked

    def started(self, seq: Sequence, now: float) -> None:
        """Note that a request left the queue for a slot."""
        self._started.append((now, len(seq.tokens)))

    def check_room(
        self,
        num_tokens: int,
        tenant: ActiveTenant | None,
        weight: float,
        limits: Limits,
        now: float,
    ) -> None:
        """Raise QueueFull when a request of `num_tokens` is one too many.

        `tenant` is whose it is, None for one without open requests: a fair share of the queue is
        there for it even where others have reached the bounds. A request that alone exceeds the
        bound on tokens may wait alone.
        """
        mine = self._seqs.get(tenant, ()) if tenant is not None else ()
        tokens = self.tokens_of(tenant) if tenant is not None else 0
        others = sum(other.weight for other in self._seqs if other is not tenant)
        share = weight / (weight + others)
        most, most_tokens = limits.max_queue_len, limits.max_queue_tokens or math.inf
        if not may_enter(len(mine), 1, self._count, most, share * most):
            what, left = f"{self._count} requests", len(self._started)
            excess = self._count + 1.0 - most
        elif self._count and not may_enter(
            tokens, num_tokens, self.num_tokens, most_tokens, share * most_tokens
        ):
            what, left = f"{self.num_tokens} tokens", sum(tokens for _, tokens in self._started)
            excess = self.num_tokens + num_tokens - most_tokens
        else:
            return
        self.num_refused += 1
        retry_after = self._wait_s(excess, left, now)
        raise QueueFull(f"{what} are waiting already", retry_after=retry_after)

    def _wait_s(self, excess: float, left: int, now: float) -> float:
        """Estimate the seconds until `excess` have left, at the rate at which `left` did lately."""
        if left:
            wait_s = excess * (now - self._started[0][0]) / left
        else:  # the request that waits longest gives a lower bound
            wait_s = now - min((seq.arrival for seq in self), default=now)
        return min(max(wait_s, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)

    def check(self) -> None:
        """Assert order and count. For tests."""
        for tenant, seqs in self._seqs.items():
            assert seqs == sorted(seqs, key=_order)
            assert seqs
            assert all(seq.tenant is tenant for seq in seqs)
            assert self._tokens[tenant] == sum(len(seq.tokens) for seq in seqs)
        assert self.num_tokens == sum(self._tokens.values())
        assert self._count == sum(map(len, self._seqs.values()))
