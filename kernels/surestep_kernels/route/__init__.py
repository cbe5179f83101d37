"""Choose the experts of tokens, and their weights."""

from __future__ import annotations

from .reference import Route, RouteSigmoid, SigmoidChoice, route_reference, route_sigmoid_reference

__all__ = ["Route", "RouteSigmoid", "SigmoidChoice", "route_reference", "route_sigmoid_reference"]
