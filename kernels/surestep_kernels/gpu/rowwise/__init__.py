"""Norms and activations in Triton."""
