"""What checkpoints say about their models: one frozen, checked object per family."""
