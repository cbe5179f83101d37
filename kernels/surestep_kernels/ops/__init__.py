"""Torch references of what layers are made of: products, norms, activations and experts."""
