"""The parts of tools/train_tiny_hybrid.py."""
