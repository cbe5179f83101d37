"""Processes by their command lines."""

from __future__ import annotations

import contextlib

import psutil


def command(process: psutil.Process) -> str:
    """Return the command line of a process: empty when it has ended, a zombie included."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def children(words: str, *, recursive: bool = False) -> list[psutil.Process]:
    """Return the living children of this process whose command lines hold these words."""
    every = psutil.Process().children(recursive=recursive)
    return [process for process in every if words in command(process)]
