"""From logits to tokens in Triton."""
