"""What Triton kernels share. In an op's triton.py stands the kernel, then what launches it.

Launchers read no tensor: grids follow from shapes and from numbers that the host knows, so that no
launch waits for the device and every launch can be part of a CUDA graph.
"""
