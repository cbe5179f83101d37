"""What the implementations of all ops in one language share."""
