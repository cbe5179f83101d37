"""Serve a model by OpenVINO GenAI's continuous batching until SIGTERM: a peer for peers.py, and for
`surestep zoo`.

    python -m venv openvino && openvino/bin/pip install openvino-genai aiohttp
    openvino/bin/python benchmarks/openvino_server.py FILE.gguf --port 8004 --slots 8

OpenVINO GenAI has no server of its own, so this is as little of one as both need: completions and
chats with one choice, streamed or not, and its sampling parameters; others are refused by name. One
thread steps the pipeline, another one answers; after a step the new tokens of all requests become
text in one call and a chunk each. With `--drafts` it speculates by prompt lookup.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openvino_genai  # type: ignore[import-not-found]  # not of this project's environment
from aiohttp import web

_ENGINE: web.AppKey[Engine] = web.AppKey("engine")
_MODEL = web.AppKey("model", str)
_INCOMPLETE = "\ufffd"  # text that ends so lacks bytes of its last character
_REASONS = {"STOP": "stop", "LENGTH": "length"}
_SAMPLING = {  # names of OpenAI's and vLLM's APIs, and of OpenVINO GenAI
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "ignore_eos")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")},
    "seed": "rng_seed",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
_OTHERS = {"model", "prompt", "messages", "stream", "stream_options", "return_token_ids"}


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text of a request, and its tokens so far."""

    text: str
    token_ids: list[int]
    num_tokens: int
    finish: str | None  # of the last chunk


@dataclass(eq=False, slots=True)
class Request:
    """Request in the pipeline; only its chunks are for the thread that answers."""

    handle: Any
    num_prompt: int
    num_tokens: int = 0
    finish: str = "stop"
    unsent: list[int] = field(default_factory=list)  # tokens that are not text yet
    chunks: asyncio.Queue[Chunk] = field(default_factory=asyncio.Queue)

    def read(self) -> bool:
        """Take the new tokens from the pipeline; whether it has said its last of the request."""
        ended = self.handle.get_status() != openvino_genai.GenerationStatus.RUNNING
        while self.handle.can_read():
            (output,) = self.handle.read().values()
            self.unsent += output.generated_ids
            self.num_tokens += len(output.generated_ids)
            self.finish = _REASONS.get(output.finish_reason.name, self.finish)
        return bool(ended)


class Engine:
    """The pipeline and the thread that steps it."""

    def __init__(self, args: argparse.Namespace) -> None:
        config = openvino_genai.SchedulerConfig()
        config.max_num_seqs = args.slots
        config.max_num_batched_tokens = args.batched_tokens
        config.cache_size = args.cache_gb
        properties = {"INFERENCE_NUM_THREADS": args.threads}
        self._drafts = args.drafts
        if args.drafts:
            properties["prompt_lookup"] = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(args.model), config, "CPU", properties
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._ids = itertools.count()
        self._arrived: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, body: dict[str, Any]) -> Request:
        """Start the request of a body. Raise ValueError for one that is not served."""
        config = self._config(body)
        prompt = body.get("prompt")
        if "messages" in body:
            prompt = self._tokenizer.apply_chat_template(body["messages"], True)
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("prompt: a text is needed")
        ids = self._tokenizer.encode(prompt, add_special_tokens="prompt" in body).input_ids
        handle = self._pipeline.add_request(next(self._ids), ids, config)
        request = Request(handle, ids.shape[1])
        self._arrived.put(request)
        return request

    def _config(self, body: dict[str, Any]) -> Any:
        if unknown := sorted(body.keys() - _SAMPLING.keys() - _OTHERS):
            raise ValueError(f"{unknown[0]}: not served")
        config = openvino_genai.GenerationConfig(max_new_tokens=16)
        config.do_sample = body.get("temperature", 1) != 0
        try:
            for name in body.keys() & _SAMPLING.keys():
                if config.do_sample or name not in ("temperature", "top_p", "top_k", "min_p"):
                    setattr(config, _SAMPLING[name], body[name])
            if self._drafts:
                config.num_assistant_tokens, config.max_ngram_size = self._drafts, 3
            config.validate()
        except (RuntimeError, TypeError) as error:
            raise ValueError(str(error).strip().splitlines()[-1]) from error
        return config

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
                finish = request.finish if last else None
                chunk = Chunk(text, request.unsent, request.num_tokens, finish)
                chunks.append((request, chunk))
                request.unsent = []
        return chunks


def _hand_over(chunks: list[tuple[Request, Chunk]]) -> None:
    for request, chunk in chunks:
        request.chunks.put_nowait(chunk)


async def completions(http: web.Request) -> web.StreamResponse:
    """Answer with the chunks of a stream and its usage, or with all of them at once."""
    body = await http.json()
    try:
        request = http.app[_ENGINE].add(body)
    except ValueError as error:
        return web.json_response({"error": {"message": str(error)}}, status=400)
    try:
        if body.get("stream"):
            return await _streamed(http, request, "messages" in body)
        chunks = [chunk async for chunk in _chunks(request)]
    finally:
        request.handle.cancel()
    ids = [token for chunk in chunks for token in chunk.token_ids]
    whole = Chunk("".join(chunk.text for chunk in chunks), ids, len(ids), chunks[-1].finish)
    key = "message" if "messages" in body else None
    return web.json_response({"choices": [_choice(whole, key)], "usage": _usage(request)})


async def _streamed(http: web.Request, request: Request, is_chat: bool) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    async for chunk in _chunks(request):
        await response.write(_event({"choices": [_choice(chunk, "delta" if is_chat else None)]}))
    await response.write(_event({"choices": [], "usage": _usage(request)}) + b"data: [DONE]\n\n")
    return response


async def _chunks(request: Request) -> AsyncIterator[Chunk]:
    while True:
        chunk = await request.chunks.get()
        yield chunk
        if chunk.finish is not None:
            return


def _choice(chunk: Chunk, key: str | None) -> dict[str, Any]:
    """Return a choice; `key` is where a chat has its text."""
    said = {"text": chunk.text} if key is None else {key: {"content": chunk.text}}
    return said | {"index": 0, "token_ids": chunk.token_ids, "finish_reason": chunk.finish}


def _usage(request: Request) -> dict[str, int]:
    return {"prompt_tokens": request.num_prompt, "completion_tokens": request.num_tokens}


async def models(http: web.Request) -> web.Response:
    """The only model."""
    return web.json_response({"data": [{"id": http.app[_MODEL], "owned_by": "openvino"}]})


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def application(args: argparse.Namespace) -> web.Application:
    """The routes that are asked for."""
    app = web.Application()
    app[_ENGINE], app[_MODEL] = Engine(args), args.model.name
    app.add_routes([web.post("/v1/completions", completions), web.get("/v1/models", models)])
    app.add_routes([web.post("/v1/chat/completions", completions)])
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
    parser.add_argument("--drafts", type=int, default=0, help="tokens by prompt lookup")
    args = parser.parse_args()
    web.run_app(application(args), host="127.0.0.1", port=args.port)


if __name__ == "__main__":
    main()
