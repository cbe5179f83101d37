"""Blocks that model files share."""
