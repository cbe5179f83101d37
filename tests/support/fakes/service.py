"""A service for tests of the launcher: `python service.py BEHAVIOUR NAME JOURNAL [PORT]`.

Appends `start NAME`, and `stop NAME` on SIGTERM, to the journal. Behaviours: `serve` answers 200 to
every GET on PORT, `run` only lives, `fail` ends at once with status 3, `deaf` ignores SIGTERM.
"""

from __future__ import annotations

import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from surestep_common.config import parent_pid
from surestep_common.process import die_with


class _Yes(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Quiet."""


def main() -> None:
    die_with(parent_pid())
    behaviour, name, journal = sys.argv[1:4]
    stopped = threading.Event()
    ignored = signal.SIG_IGN if behaviour == "deaf" else None
    signal.signal(signal.SIGTERM, ignored or (lambda *_: stopped.set()))
    note(journal, f"start {name}")
    if behaviour == "fail":
        sys.exit("bad settings" if name == "talker" else 3)
    if behaviour == "serve":
        server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[4])), _Yes)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    stopped.wait()
    note(journal, f"stop {name}")


def note(journal: str, line: str) -> None:
    with Path(journal).open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()
