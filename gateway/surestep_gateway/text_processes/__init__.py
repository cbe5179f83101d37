"""Preparation of large requests in processes apart from the event loop."""
