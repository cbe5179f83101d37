"""Adapters of low rank: their folders, the pool that a rank has them in, and their products."""
