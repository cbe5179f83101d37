"""The Python client: python examples/grpc/package_client.py HOST:PORT TOKEN_ID...

Set SURESTEP_API_KEY where the server was started with --grpc-api-key.
"""

from __future__ import annotations

import os
import sys

from surestep.client import Client, SamplingParams, SurestepError


def main(address: str, *prompt: str) -> int:
    """Print the answer as it comes; returns the exit status."""
    greedy = SamplingParams(temperature=0)  # whatever is left out is the model's default
    prompt_ids = [int(id_) for id_ in prompt]
    try:
        with Client(address, api_key=os.environ.get("SURESTEP_API_KEY")) as client:
            for chunk in client.stream(prompt_ids, greedy, max_tokens=24, timeout_s=60):
                print(*chunk.token_ids, sep=" ", end=" ", flush=True)
    except SurestepError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
