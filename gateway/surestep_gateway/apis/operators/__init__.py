"""Endpoints for operators: health, metrics, status, pages, and the admin endpoint."""
