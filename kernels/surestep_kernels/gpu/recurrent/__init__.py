"""Convolution and gated delta rule in Triton."""
