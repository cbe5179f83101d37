"""Faults of a whole server: how they are caused, and the streams that must not notice."""
