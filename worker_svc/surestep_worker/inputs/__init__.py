"""What the host sends with a step, and where the device keeps it."""
