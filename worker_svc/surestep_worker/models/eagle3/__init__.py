"""EAGLE-3 draft heads."""
