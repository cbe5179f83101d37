"""See the package around this one."""
