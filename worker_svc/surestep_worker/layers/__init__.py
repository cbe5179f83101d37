"""Layers, the one decoder that is made of them, and draft heads beside it."""
