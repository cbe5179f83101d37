"""Attention and recurrent layers, and the caches they read, in torch."""
