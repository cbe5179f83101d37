"""How Triton kernels are launched, and which launches compile."""
