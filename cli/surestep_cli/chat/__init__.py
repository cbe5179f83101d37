"""`surestep chat`."""
