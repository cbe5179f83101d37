"""Serve a model by OpenVINO GenAI's continuous batching until SIGTERM: a peer for peers.py.

    python -m venv openvino && openvino/bin/pip install openvino-genai aiohttp
    openvino/bin/python benchmarks/openvino_server.py FILE.gguf --port 8004 --slots 8

OpenVINO GenAI has no server of its own, so this is as little of one as the load generator needs:
streamed, greedy completions. One thread steps the pipeline, another one answers; after a step the
new tokens of all requests become text in one call and a chunk each.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openvino_genai  # type: ignore[import-not-found]  # not of this project's environment
from aiohttp import web

_ENGINE: web.AppKey[Engine] = web.AppKey("engine")
_MODEL = web.AppKey("model", str)
_INCOMPLETE = "\ufffd"  # text that ends so lacks bytes of its last character


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text of a request, and its tokens so far."""

    text: str
    num_tokens: int
    last: bool


@dataclass(eq=False, slots=True)
class Request:
    """Request in the pipeline; only its chunks are for the thread that answers."""

    handle: Any
    num_prompt: int
    num_tokens: int = 0
    unsent: list[int] = field(default_factory=list)  # tokens that are not text yet
    chunks: asyncio.Queue[Chunk] = field(default_factory=asyncio.Queue)

    def read(self) -> bool:
        """Take the new tokens from the pipeline; whether it has said its last of the request."""
        ended = self.handle.get_status() != openvino_genai.GenerationStatus.RUNNING
        while self.handle.can_read():
            (output,) = self.handle.read().values()
            self.unsent += output.generated_ids
            self.num_tokens += len(output.generated_ids)
        return bool(ended)


class Engine:
    """The pipeline and the thread that steps it."""

    def __init__(self, args: argparse.Namespace) -> None:
        config = openvino_genai.SchedulerConfig()
        config.max_num_seqs = args.slots
        config.max_num_batched_tokens = args.batched_tokens
        config.cache_size = args.cache_gb
        properties = {"INFERENCE_NUM_THREADS": args.threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(args.model), config, "CPU", properties
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._ids = itertools.count()
        self._arrived: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, body: dict[str, Any]) -> Request:
        """Start the request of a body."""
        prompt = self._tokenizer.encode(body["prompt"]).input_ids
        config = openvino_genai.GenerationConfig(
            max_new_tokens=body["max_tokens"],
            ignore_eos=body.get("ignore_eos", False),
            do_sample=False,
        )
        handle = self._pipeline.add_request(next(self._ids), prompt, config)
        request = Request(handle, prompt.shape[1])
        self._arrived.put(request)
        return request

    def _run(self) -> None:
        running: list[Request] = []
        while True:
            while not running or not self._arrived.empty():
                running.append(self._arrived.get())
            self._pipeline.step()
            ended = {request for request in running if request.read()}
            chunks = self._chunks(running, ended)
            self._loop.call_soon_threadsafe(_hand_over, chunks)
            running = [request for request in running if request not in ended]

    def _chunks(self, running: list[Request], ended: set[Request]) -> list[tuple[Request, Chunk]]:
        ready = [request for request in running if request.unsent or request in ended]
        texts = self._tokenizer.decode([request.unsent for request in ready]) if ready else []
        chunks = []
        for request, text in zip(ready, texts, strict=True):
            last = request in ended
            if last or not text.endswith(_INCOMPLETE):
                chunks.append((request, Chunk(text, request.num_tokens, last)))
                request.unsent = []
        return chunks


def _hand_over(chunks: list[tuple[Request, Chunk]]) -> None:
    for request, chunk in chunks:
        request.chunks.put_nowait(chunk)


async def completions(http: web.Request) -> web.StreamResponse:
    """Stream the chunks of an answer, then its usage."""
    request = http.app[_ENGINE].add(await http.json())
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    try:
        last = False
        while not last:
            chunk = await request.chunks.get()
            last = chunk.last
            await response.write(_event({"choices": [{"index": 0, "text": chunk.text}]}))
    finally:
        request.handle.cancel()
    usage = {"prompt_tokens": request.num_prompt, "completion_tokens": chunk.num_tokens}
    await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
    return response


async def models(http: web.Request) -> web.Response:
    """The only model."""
    return web.json_response({"data": [{"id": http.app[_MODEL]}]})


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def application(args: argparse.Namespace) -> web.Application:
    """The two routes that the load generator asks for."""
    app = web.Application()
    app[_ENGINE], app[_MODEL] = Engine(args), args.model.name
    app.add_routes([web.post("/v1/completions", completions), web.get("/v1/models", models)])
    return app


def main() -> None:
    """Serve a GGUF file or a folder with a model in OpenVINO's format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--batched-tokens", type=int, default=256, help="of a step")
    parser.add_argument("--cache-gb", type=int, default=1, help="keys and values")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    web.run_app(application(args), host="127.0.0.1", port=args.port)


if __name__ == "__main__":
    main()
