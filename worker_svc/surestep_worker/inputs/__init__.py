"""What the host sends with a step, and where it lands on the device."""
