"""Tell which functions a process runs: Python imports this at the start of each process under test.

While the file `on1` is in the folder that TRACE_FOLDER names, calls are noted; `<pid>.begun1` says so.
When it is gone, `<pid>.json1` gets the name of the file, and of the function, of each. `on2` follows.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER = Path(os.environ["TRACE_FOLDER"])
CALLED = set[CodeType]()
ON = threading.Event()


def note(frame: FrameType, event: str, argument: Any) -> None:
    """Note a call, if it is wanted."""
    if event == "call" and ON.is_set():
        CALLED.add(frame.f_code)


def follow() -> None:
    """Begin and end with one file after the other."""
    for number in count(1):
        note_while(number)


def note_while(number: int) -> None:
    """Begin and end with the file of this number."""
    flag, own = FOLDER / f"on{number}", FOLDER / str(os.getpid())
    CALLED.clear()
    while not flag.exists():
        time.sleep(0.01)
    ON.set()
    own.with_suffix(f".begun{number}").touch()
    while flag.exists():
        time.sleep(0.01)
    ON.clear()
    told = sorted({(code.co_filename, code.co_qualname) for code in CALLED})
    scratch = own.with_suffix(".new")
    scratch.write_text(json.dumps(told))
    scratch.rename(own.with_suffix(f".json{number}"))


def begin() -> None:
    """Follow in a thread, which no copy of this process has: its parent's do not count."""
    threading.Thread(target=follow, daemon=True).start()


sys.setprofile(note)
threading.setprofile(note)
begin()
os.register_at_fork(after_in_child=begin)
