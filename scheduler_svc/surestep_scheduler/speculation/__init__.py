"""How many drafts pay, and whether speculation pays at all."""
