"""Sampling parameters of slots, and log-probabilities of chosen tokens."""
