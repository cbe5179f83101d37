"""Who a client is, by its key."""

from __future__ import annotations

from typing import NamedTuple


class Client(NamedTuple):
    """The owner of an API key."""

    name: str
    weight: float = 1.0  # of its share of the workers, against others
    may_prioritise: bool = True  # its requests may carry a `priority`
