#!/usr/bin/env bash
# Compiles every case of compile_cases.py for sm_90 in several processes: compile_all.sh PYTHON PROCESSES [OPTION...]
# What they compile stays in Triton's cache.
set -uo pipefail
python=$1 count=$2
shift 2
pids=() failed=0
for ((i = 0; i < count; i++)); do
  "$python" tests/support/kernels/compile_launchers.py --full --share "$i" "$count" "$@" |
    awk '/"registers"/ {next} {print} /"error"/ {bad = 1} END {exit bad}' &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
exit "$failed"
