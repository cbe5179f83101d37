"""Weights of GGUF files, kept packed."""
