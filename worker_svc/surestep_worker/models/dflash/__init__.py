"""DFlash drafters."""
