"""Requests among strangers, drafters and mutants: the parity matrices."""
