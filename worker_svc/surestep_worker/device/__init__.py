"""Steps whose state lives on the device: the host plans geometry and reads results, and waits for
nothing in between. See docs/gpu.md."""
