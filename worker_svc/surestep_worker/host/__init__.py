"""Host resources of a rank: memory, and its heartbeat."""
