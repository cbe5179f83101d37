"""`surestep collect-env`: facts of a machine for a report of a fault."""
