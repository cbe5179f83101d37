"""Output of sequences: detokenisation, log-probabilities, deltas and whole messages."""
