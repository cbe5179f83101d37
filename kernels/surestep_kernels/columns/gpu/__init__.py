"""Code that Triton kernels share. An op's triton.py has the kernel, then its launcher.

Launchers read no tensor: grids follow from shapes and from numbers that the host knows, so that no
launch waits for the device and every launch can be part of a CUDA graph.
"""
