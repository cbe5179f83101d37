"""Attention in Triton or by flash-attn."""
