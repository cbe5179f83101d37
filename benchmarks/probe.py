"""Asks a URL again and again, in a process of its own, and prints how long each answer took.

python benchmarks/probe.py http://127.0.0.1:8000/health
"""

from __future__ import annotations

import http.client
import sys
import time
from urllib.parse import urlsplit

PAUSE_S = 0.005
TIMEOUT_S = 120.0


def ask(host: str, path: str) -> float:
    """Seconds until the answer was there; the timeout if there was none."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return TIMEOUT_S
    finally:
        connection.close()
    return time.monotonic() - began


def main() -> None:
    """A line for every answer: its time on the monotonic clock and the seconds that it took."""
    url = urlsplit(sys.argv[1])
    while True:
        began = time.monotonic()
        took = ask(url.netloc, url.path)
        print(f"{began:.6f} {took:.6f}", flush=True)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
