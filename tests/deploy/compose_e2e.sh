#!/usr/bin/env bash
# Builds and runs docker-compose.yml for real: a chat answer through the published port, a `docker
# kill` of the worker in the middle of a stream, the same text as without it. Skipped where there is
# no Docker engine. Variables of docker-compose.yml apply (BASE_IMAGE, BUILD_NETWORK, ...).
set -euo pipefail
cd "$(dirname "$0")/../.."

skip() { echo "SKIPPED compose_e2e: $1"; exit 0; }
command -v docker >/dev/null || skip "docker is not installed"
docker info >/dev/null 2>&1 || skip "no Docker engine answers"
if docker compose version >/dev/null 2>&1; then compose=(docker compose)
elif command -v docker-compose >/dev/null; then compose=(docker-compose)
else skip "docker compose is not installed"; fi
compose+=(-p surestep-e2e)

export SURESTEP_PUBLISH=${SURESTEP_PUBLISH:-127.0.0.1:18000}
export SURESTEP_SPECULATIVE_CONFIG='{"method":"ngram","num_speculative_tokens":4}'
url=http://$SURESTEP_PUBLISH scratch=$(mktemp -d)

finish() {
  local status=$?
  [ $status = 0 ] || "${compose[@]}" logs --no-color --tail 40 || true
  "${compose[@]}" down --volumes --timeout 10 >/dev/null 2>&1 || true
  rm -rf "$scratch"
  exit $status
}
trap finish EXIT

wait_ready() {
  for _ in $(seq 600); do
    curl -fs -o /dev/null "$url/health/ready" && return
    sleep 1
  done
  echo "not ready after 600 s" >&2
  return 1
}

# stream FILE: one seeded completion as server-sent events.
stream() {
  curl -fsSN --max-time 300 "$url/v1/completions" -H 'Content-Type: application/json' -d '{
    "model": "SmolLM2-135M-Instruct", "prompt": "Once upon a time", "max_tokens": 400,
    "temperature": 0.8, "seed": 7, "ignore_eos": true, "stream": true}' >"$1"
}

text() { # FILE: what a client has read; fails unless the stream ended well
  python3 - "$1" <<'PYTHON'
import json, sys
lines = [line[6:].strip() for line in open(sys.argv[1]) if line.startswith("data: ")]
assert lines[-1] == "[DONE]", lines[-3:]
chunks = [json.loads(line) for line in lines[:-1]]
assert not any("error" in chunk for chunk in chunks), chunks[-1]
print("".join(choice["text"] for chunk in chunks for choice in chunk["choices"]))
PYTHON
}

"${compose[@]}" build
"${compose[@]}" up -d
wait_ready
echo "--- a chat answer"
curl -fsS "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "model": "SmolLM2-135M-Instruct", "max_tokens": 40, "temperature": 0,
  "messages": [{"role": "user", "content": "What is the capital of France?"}]}' | tee "$scratch/chat"
echo
grep -q Paris "$scratch/chat"

echo "--- a stream without faults, then one whose worker is killed"
stream "$scratch/quiet"
text "$scratch/quiet" >"$scratch/quiet.txt"
stream "$scratch/hit" &
client=$!
for _ in $(seq 600); do
  [ "$(grep -c '^data: ' "$scratch/hit" 2>/dev/null)" -ge 20 ] && break
  sleep 0.1
done
kill -0 $client || { echo "the stream ended before the kill" >&2; exit 1; }
docker kill "$("${compose[@]}" ps -q worker)" >/dev/null
wait $client
text "$scratch/hit" >"$scratch/hit.txt"
cmp "$scratch/quiet.txt" "$scratch/hit.txt"
echo "the killed worker changed nothing: $(wc -w <"$scratch/hit.txt") words"

echo "--- containers without root"
for service in gateway scheduler worker; do
  [ "$(docker exec "$("${compose[@]}" ps -q $service)" id -u)" != 0 ]
done
! docker exec "$("${compose[@]}" ps -q gateway)" python -c 'import torch' 2>/dev/null
echo "PASSED compose_e2e"
