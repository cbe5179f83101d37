"""Ranks of a group: collectives, how they meet, and memory that they share."""
