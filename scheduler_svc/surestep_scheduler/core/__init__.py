"""The pure state of the scheduler, and what results do to it."""
