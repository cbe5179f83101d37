"""Benchmarks of kernels and steps on a GPU: `python -m gpu.NAME`, as scripts/gpu_check does."""
