"""Run the layers of a dense decoder in one call."""

from __future__ import annotations

from .reference import DenseLayer, LayerTokens, RunDenseLayers

__all__ = ["DenseLayer", "LayerTokens", "RunDenseLayers"]
