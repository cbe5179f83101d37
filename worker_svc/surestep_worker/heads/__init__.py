"""Draft heads that come with the program, and those that lie on this machine."""

from .built_in import head_folder

__all__ = ["head_folder"]
