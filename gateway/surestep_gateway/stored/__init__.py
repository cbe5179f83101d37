"""Responses that outlive their requests: those that are stored, and those that may be cancelled."""
