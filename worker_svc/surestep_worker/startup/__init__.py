"""From settings to a ready rank: memory, caches, kernels, and steps that check and measure them."""
