"""Steps: the host plans their geometry and reads their results, and what lies between is launched.

See docs/gpu.md."""
