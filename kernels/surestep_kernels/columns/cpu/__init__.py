"""CPU kernels in C, compiled on first use or ahead of time and called through ctypes."""
