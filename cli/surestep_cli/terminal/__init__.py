"""Output to terminals, pipes and files."""
