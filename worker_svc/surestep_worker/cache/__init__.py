"""The memory of sequences: pages of keys and values, and recurrent states."""
