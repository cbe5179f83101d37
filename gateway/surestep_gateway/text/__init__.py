"""Tokenizer, special tokens and chat templates of a model."""
