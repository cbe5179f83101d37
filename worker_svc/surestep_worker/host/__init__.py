"""Host resources of a rank: memory, and what the kernel says of processes."""
