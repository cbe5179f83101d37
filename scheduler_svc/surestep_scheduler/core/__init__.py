"""The pure state of the scheduler, what results do to it, and the search for poison requests."""
