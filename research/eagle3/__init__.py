"""The parts of research/train_eagle3.py."""
