"""The parts of research/train_tiny_hybrid.py."""
