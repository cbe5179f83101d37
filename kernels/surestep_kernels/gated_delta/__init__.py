"""Update and read the state of gated linear attention, token by token or in chunks."""

from __future__ import annotations

from .reference import gated_delta_reference

__all__ = ["gated_delta_reference"]
