"""What the host gives a rank: memory, and signs of life."""
