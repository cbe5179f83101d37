"""Routed experts in Triton."""
