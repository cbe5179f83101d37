"""Prometheus metrics of the gateway, its schedulers and their ranks."""
