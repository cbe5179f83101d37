"""Steps: the host plans their geometry and reads their results; all between is launched.

See docs/run/gpu.md."""
