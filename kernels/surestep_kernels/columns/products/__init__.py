"""Products in Triton: families of kernels, and the probe that chooses between them."""
