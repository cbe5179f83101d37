"""Flags, their values, their help, and those of vLLM."""
