"""Shares of what is scarce between tenants: slots, blocks, tokens of a step.

Everything here is a pure function of counts. A tenant alone may use all there is; one that
wants less than its share leaves the rest to the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def fair_shares(
    capacity: float, demands: Sequence[float] | FloatArray, weights: Sequence[float] | FloatArray
) -> FloatArray:
    """Max-min fair shares [T] of `capacity` by weight, none above its demand (water filling)."""
    wanted, weight = np.asarray(demands, np.float64), np.asarray(weights, np.float64)
    if wanted.sum() <= capacity:
        return wanted
    order = (wanted / weight).argsort(kind="stable")
    level, left, heavy = 0.0, capacity, weight.sum()
    for tenant in order.tolist():  # those that want least are satisfied first
        level = left / heavy
        if wanted[tenant] >= level * weight[tenant]:
            break
        left -= wanted[tenant]
        heavy -= weight[tenant]
    return np.minimum(wanted, level * weight)


def entitlements(
    capacity: int, demands: Sequence[float] | FloatArray, weights: Sequence[float] | FloatArray
) -> list[int]:
    """Whole places [T] to which each is entitled: its fair share, and one in any case.

    A tenant with fewer may take one from a tenant with more. Both hold for as long as the demands
    stay what they are, so that nothing is taken back and forth.
    """
    return [max(1, int(share)) for share in fair_shares(capacity, demands, weights)]
