"""Embeddings, scores and rankings, with vLLM's fields."""
