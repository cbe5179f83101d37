"""Draft heads that come with the program."""

from .built_in import head_folder

__all__ = ["head_folder"]
