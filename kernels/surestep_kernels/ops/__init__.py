"""Products, norms, activations and experts: what layers are made of, in torch."""
