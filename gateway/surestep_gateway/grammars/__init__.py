"""Grammars: what clients ask of an output, as llguidance's sources. No tokens, and no model."""
