"""Without Surestep installed, from its .proto files: what a client in any language has to do.

surestep proto protos
pip install grpcio-tools
python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. protos/*/*.proto
python examples/grpc/generated_stubs.py HOST:PORT TOKEN_ID...
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator

import grpc
from surestep_proto import scheduler_pb2 as pb
from surestep_proto.scheduler_pb2_grpc import SchedulerStub

PATIENCE_S = 60  # without a token
# Notices a server that hangs: connections stay up while the process behind them stands still.
OPTIONS = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
]


def stream(
    stub: SchedulerStub, request: pb.GenerateRequest, metadata: list[tuple[str, str]]
) -> Iterator[int]:
    """Token ids of the answer, in as many calls as it takes."""
    name, calls, last_token = request.request_id, 0, time.monotonic()
    while True:
        request.request_id = f"{name}.{calls}"  # each call has an id of its own
        calls += 1
        try:
            for chunk in stub.Generate(request, timeout=60, metadata=metadata):
                if chunk.HasField("start") and not request.model_fingerprint:
                    # Another server, or the same one later, goes on as this one has begun.
                    request.model_fingerprint = chunk.start.model_fingerprint
                    request.resolved.CopyFrom(chunk.start.resolved)
                request.emitted_ids.extend(chunk.token_ids)
                yield from chunk.token_ids
                if chunk.token_ids:
                    last_token = time.monotonic()
                if chunk.finish_reason:
                    return
        except grpc.RpcError as error:
            late = time.monotonic() - last_token > PATIENCE_S
            if error.code() is not grpc.StatusCode.UNAVAILABLE or late:
                raise
        time.sleep(0.5)


def main(address: str, *prompt: str) -> int:
    """Print the answer as it comes; returns the exit status."""
    key = os.environ.get("SURESTEP_API_KEY")
    metadata = [("authorization", f"Bearer {key}")] if key else []
    request = pb.GenerateRequest(
        request_id=f"example-{uuid.uuid4().hex}",
        prompt_ids=[int(id_) for id_ in prompt],
        max_tokens=24,
    )
    request.sampling.temperature = 0  # greedy; left out it would be the model's default
    with grpc.insecure_channel(address, OPTIONS) as channel:
        try:
            for token in stream(SchedulerStub(channel), request, metadata):
                print(token, end=" ", flush=True)
        except grpc.RpcError as error:
            trailing = error.trailing_metadata() or ()
            wrong = next(
                (str(entry.value) for entry in trailing if entry.key == "surestep-param"), ""
            )
            print(f"{error.code().name} {wrong}: {error.details()}", file=sys.stderr)
            return 1
    print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
