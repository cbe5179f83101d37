"""Torch references of attention and recurrent layers, and the caches they read."""
