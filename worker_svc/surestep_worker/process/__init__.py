"""The processes of a rank: its supervisor, the rank itself, and the service that takes plans."""
