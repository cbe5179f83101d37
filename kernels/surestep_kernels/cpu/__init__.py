"""The kernels of CPUs: C, compiled when it is first used or ahead, called through ctypes."""
