"""Models as checkpoints describe them: one frozen, checked object per family."""
