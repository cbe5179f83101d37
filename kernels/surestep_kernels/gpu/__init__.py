"""The ops as Triton kernels: one file per op, the kernel first, then the function that launches it.

What an op computes is defined by its reference, in the file of the same name one folder up.
Launchers read no tensor: grids follow from shapes and from numbers that the host knows, so that no
launch waits for the device and every launch can be part of a CUDA graph.
"""
