"""The other ops of a step in Triton."""
