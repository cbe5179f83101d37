"""A bound on what all clients have together, of which a fair share is there for each of them."""

from __future__ import annotations

_OVERFULL = 2  # times the bound that there may be, for clients below their share of it


def may_enter(held: float, more: float, total: float, bound: float, share: float) -> bool:
    """Return whether a client that has `held` of `total` may have `more` under this bound.

    Where the bound is reached, `share` of it is still there for this client; and one request,
    whatever its size, for a client that has nothing. All five are counts of the same things.
    """
    if total + more <= bound:
        return True
    return total + more <= _OVERFULL * bound and (not held or held + more <= share)
