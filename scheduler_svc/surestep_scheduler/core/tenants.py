"""Tenants, and how much service each has received.

A tenant's counter is what it was given over its weight (virtual token counters: Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024). The smallest counter is next. A tenant
that begins to wait is lifted to the smallest of those that wait already, so that none saves up;
and to what each would have if all had been served alike, so that an endless row of new tenants
keeps none waiting for ever (the virtual time of Parekh and Gallager, "A Generalized Processor
Sharing Approach to Flow Control", 1993).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
