"""Plan the next step. Pure: the policy decides from its arguments alone."""
