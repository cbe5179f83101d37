"""Streams of completions in a row of threads: URL MODEL COUNT TOKENS. Runs in a pod, so of the standard library.

Prints `open` when every stream has some text, and at the end one JSON object: the texts, the longest
pause between two tokens, and what went wrong.
"""

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator

url, model, count, num_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
PROMPTS = ("Once upon a time", "The capital of France is", "def fibonacci(n):", "Dear diary,")
texts, pauses = [""] * count, [0.0] * count
errors: list[str] = []
begun = threading.Barrier(count + 1)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def events(answer: Iterable[bytes]) -> Iterator[str]:
    for line in answer:
        if line.startswith(b"data: "):
            yield line[6:].decode().strip()


def stream(index: int) -> None:
    body = {
        "model": model,
        "prompt": PROMPTS[index % len(PROMPTS)],
        "max_tokens": num_tokens,
        "temperature": 0.8 if index % 2 else 0,
        "seed": index,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    data, last, told = "", time.monotonic(), False
    with urllib.request.urlopen(request, timeout=600) as answer:
        for data in events(answer):
            if data == "[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(data)
            now = time.monotonic()
            if texts[index]:
                pauses[index] = max(pauses[index], now - last)
            last = now
            texts[index] += "".join(choice["text"] for choice in event["choices"])
            if not told and texts[index]:
                told = True
                begun.wait(300)
    if data != "[DONE]":
        raise RuntimeError(f"broke off after {len(texts[index])} characters: {data[:200]}")


def run(index: int) -> None:
    try:
        stream(index)
    except urllib.error.HTTPError as error:
        errors.append(f"stream {index}: HTTP {error.code}: {error.read().decode()[:300]}")
    except (OSError, RuntimeError, ValueError, LookupError) as error:
        errors.append(f"stream {index}: {type(error).__name__}: {error}")
    if errors:
        begun.abort()


threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
for thread in threads:
    thread.start()
try:
    begun.wait(600)
    say("open")
except threading.BrokenBarrierError:
    errors.append("not all streams began")
for thread in threads:
    thread.join()
say(json.dumps({"texts": texts, "pause": round(max(pauses), 1), "errors": errors}))
