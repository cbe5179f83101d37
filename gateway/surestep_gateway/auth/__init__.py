"""API keys, and the tenants that requests count for."""
