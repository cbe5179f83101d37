"""What the next step does. Pure: it decides from its arguments alone."""
