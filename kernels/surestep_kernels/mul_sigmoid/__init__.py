"""Multiply rows in place by the sigmoid of their gates."""

from __future__ import annotations

from .reference import mul_sigmoid_reference

__all__ = ["mul_sigmoid_reference"]
