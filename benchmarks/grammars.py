"""Measure the cost of grammars, and the gain of their forced tokens, on a running server.

    surestep serve MODEL --scheduler-listen 127.0.0.1:50051 --grpc-api-key KEY
    python benchmarks/grammars.py MODEL --address 127.0.0.1:50051 --api-key KEY

Prints one JSON object: tokens per second of an extraction at one client with and without drafts of
forced tokens, those of long documents at many clients with and without a grammar, and microseconds
per mask. Runs with and without alternate; each figure is the median of its rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from llguidance import LLMatcher
from surestep.client import Client, SamplingParams
from surestep_proto.sampling_pb2 import Grammar
from surestep_worker.grammar.matcher import matcher_of, tokenizer_of
from surestep_worker.grammar.walk import Walk
from tokenizers import Tokenizer

EXTRACTION: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 24},
        "customer_country": {"enum": ["Norway", "Sweden", "Denmark", "Finland"]},
        "order_number": {"type": "integer", "minimum": 0, "maximum": 99999},
        "number_of_items": {"type": "integer", "minimum": 0, "maximum": 99},
        "delivery_requested": {"type": "boolean"},
        "complaint_category": {"enum": ["damaged", "late", "missing", "other"]},
        "refund_requested": {"type": "boolean"},
        "contact_preference": {"enum": ["email", "phone"]},
    },
    "additionalProperties": False,
}
EXTRACTION["required"] = list(EXTRACTION["properties"])
ENDLESS = {"type": "array", "items": {"type": "string"}, "minItems": 100_000}
TEXTS = (
    "Ada Hansen from Oslo writes that 3 lamps of order 4711 came broken. She wants her money.",
    "Order 20314, two chairs, has not arrived. Please call me. Lars Berg, Uppsala.",
    "Hello, where is my parcel? Number 88, one kettle. Regards, Mette Holm, Aarhus.",
    "Matti Virtanen, Turku: order 5150 had nine cups, eight were in the box. Send me an e-mail.",
)

Run = Callable[[], float]


def compact(schema: dict[str, Any]) -> str:
    """Return the grammar of a schema without white space between tokens."""
    source: str = LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_flexible": False}
    )
    return source


class Bench:
    """Requests of one kind, some of which run at once."""

    def __init__(self, client: Client, tokenizer: Tokenizer) -> None:
        self._client, self._tokenizer = client, tokenizer

    def prompt(self, text: str) -> list[int]:
        asked = (
            f"<|im_start|>user\nExtract the facts of this message as JSON.\n{text}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        ids: list[int] = self._tokenizer.encode(asked, add_special_tokens=False).ids
        return ids

    def rate(
        self,
        prompts: Sequence[list[int]],
        clients: int,
        source: str,
        max_tokens: int,
        drafts: int | None,
        *,
        ignore_eos: bool,
    ) -> float:
        """Return tokens per second, prompts included in the time; no source: no grammar."""

        def ask(prompt: list[int]) -> int:
            sampling = SamplingParams(temperature=0)
            if source:
                sampling.grammar.CopyFrom(Grammar(source=source))
            options: Any = {"num_draft_tokens": drafts, "ignore_eos": ignore_eos}
            answer = self._client.generate(prompt, sampling, max_tokens=max_tokens, **options)
            return len(answer.token_ids)

        began = time.perf_counter()
        with ThreadPoolExecutor(clients) as threads:
            tokens = sum(threads.map(ask, prompts))
        return tokens / (time.perf_counter() - began)


def alternate(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Return the median of each, after one round that does not count."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            rate = run()
            if number:
                rates[name].append(rate)
                sys.stderr.write(f"{name}: {rate:.2f} tokens/s\n")
    return {name: round(median(found), 2) for name, found in rates.items()}


def mask_us(model: Path, text: str, source: str) -> float:
    """Return the mean microseconds of a mask along a document, once its parts have been seen."""
    config = json.loads((model / "config.json").read_text())
    eos = config["eos_token_id"]
    eos_ids = eos if isinstance(eos, list) else [eos]
    tokenizer = tokenizer_of(model / "tokenizer.json", config["vocab_size"], eos_ids)
    base, spent = Walk(matcher_of(tokenizer, source), [], eos_ids), 0.0
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    words = np.zeros(-(-config["vocab_size"] // 32), dtype=np.int32)
    for _ in range(3):
        walk, spent = base.copy(), 0.0
        for token in ids:
            began = time.perf_counter()
            walk.fill(words)
            spent += time.perf_counter() - began
            walk.advance(token)
    return round(spent / len(ids) * 1e6, 1)


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--address", required=True)
    parser.add_argument("--api-key")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--texts", type=int, default=len(TEXTS))
    options = parser.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    with Client(options.address, api_key=options.api_key) as client:
        bench = Bench(client, tokenizer)
        prompts = [bench.prompt(text) for text in TEXTS[: options.texts]]
        many = [bench.prompt(f"{i}: {TEXTS[i % len(TEXTS)]}") for i in range(options.clients)]
        source, endless, tokens = compact(EXTRACTION), compact(ENDLESS), options.tokens

        def extract(source: str, drafts: int | None) -> Run:
            return lambda: bench.rate(prompts, 1, source, 160, drafts, ignore_eos=False)

        def crowd(source: str) -> Run:
            return lambda: bench.rate(many, options.clients, source, tokens, 0, ignore_eos=True)

        forced = {
            "free": extract("", 0),
            "plain": extract(source, 0),
            "forced": extract(source, None),
        }
        one = alternate(forced, options.rounds)
        crowded = alternate({"free": crowd(""), "grammar": crowd(endless)}, options.rounds)
    example = '{"customer_name":"Ada Hansen","customer_country":"Norway","order_number":4711,'
    figures = {
        "tokens_per_s_1_client": one,
        "speedup": round(one["forced"] / one["plain"], 2),
        f"tokens_per_s_{options.clients}_clients": crowded,
        "overhead": round(crowded["free"] / crowded["grammar"] - 1, 3),
        "mask_us": mask_us(options.model, example, source),
    }
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
