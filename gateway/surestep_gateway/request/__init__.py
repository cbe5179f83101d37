"""Requests: their fields, their validation, their prompts and sampling parameters."""
