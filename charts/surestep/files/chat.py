"""Sends one chat request: URL MODEL SECONDS. What `helm test` runs in the gateway's image."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

url, model, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
deadline = time.monotonic() + seconds
keys = [line.split()[0] for line in os.environ.get("API_KEYS", "").splitlines() if line.strip()]
headers = {"Content-Type": "application/json"}
if keys:
    headers["Authorization"] = f"Bearer {keys[0]}"
body = {
    "model": model,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 40,
    "temperature": 0,
}
# The certificate names the host that clients use, which is not the Service's.
trust = ssl._create_unverified_context()


def call(path, data=None):
    request = urllib.request.Request(url + path, data, headers)
    left = max(1.0, deadline - time.monotonic())
    with urllib.request.urlopen(request, timeout=left, context=trust) as answer:
        return answer.read()


said = ""
while True:
    try:
        call("/health/ready")
        break
    except urllib.error.HTTPError as error:
        now = error.read().decode(errors="replace")
    except OSError as error:
        now = str(error)
    if now != said:
        said = now
        print(f"not ready: {said}", flush=True)
    if time.monotonic() > deadline:
        sys.exit(f"{url} is not ready after {seconds:g} s")
    time.sleep(1)
try:
    answer = json.loads(call("/v1/chat/completions", json.dumps(body).encode()))
except urllib.error.HTTPError as error:
    sys.exit(f"HTTP {error.code}: {error.read().decode(errors='replace')}")
choice = answer["choices"][0]
print(f"{model} says: {choice['message']['content']}")
assert choice["finish_reason"] in ("stop", "length"), choice
assert answer["usage"]["completion_tokens"] > 0, answer
