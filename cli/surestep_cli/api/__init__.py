"""The HTTP API of a running server, as the commands call it."""
