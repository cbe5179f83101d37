"""Convolve the last tokens of a request, channel by channel, with a state between steps."""

from __future__ import annotations

from .reference import causal_conv_reference

__all__ = ["causal_conv_reference"]
