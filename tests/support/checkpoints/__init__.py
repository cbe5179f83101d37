"""Tiny checkpoints and tokenizers, written by the libraries that users have."""
