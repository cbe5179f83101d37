"""Checkpoints: files, headers, quantisation schemes, and the memory that outlives a rank."""
