"""From settings to a rank that is ready: memory, caches, kernels, and steps that try them."""
