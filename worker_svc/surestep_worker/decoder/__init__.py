"""The one decoder of all families, what a family tells it, and draft heads beside it."""
