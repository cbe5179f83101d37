"""The parts of tools/train_eagle3.py."""
