"""Clients of schedulers: the pool, routing, and requests that survive a lost scheduler."""
