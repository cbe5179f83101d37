"""How long tests wait for what must come, and whose speed they do not measure."""

PATIENCE_S = 60  # less than a test may take, and much more than any of it takes on a busy machine
