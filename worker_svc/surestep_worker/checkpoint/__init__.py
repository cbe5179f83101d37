"""Checkpoints: files, headers, the forms weights come in, and the memory that outlives a rank."""
