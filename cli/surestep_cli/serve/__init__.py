"""`surestep serve`: models, ports, service processes and their supervision."""
