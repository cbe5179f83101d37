"""A server that drafts, asked for completions with more drafts and fewer: its texts are equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.clients.completions import client_of, read
from support.processes.stack import Stack

SIZES = ("--max-num-seqs", "8", "--kv-cache-memory", "0.02", "--max-model-len", "400")


def speculation(drafter: Path, drafts: int, **method: str) -> tuple[str, ...]:
    """Flags for a drafter in a folder; without a method that is found out."""
    about = {"model": str(drafter), "num_speculative_tokens": drafts, **method}
    return "--speculative-config", json.dumps(about), "--no-adaptive-draft-length"


def complete(stack: Stack, name: str, drafts: int, prompt: str = "a quick", **options: Any) -> Any:
    extra = {"speculative": {"num_tokens": drafts}, **options.pop("extra_body", {})}
    options = {"max_tokens": 200, "temperature": 0.9, "seed": 5} | options
    return client_of(stack).completions.create(
        model=name, prompt=prompt, extra_body=extra, **options
    )


def check_drafts(stack: Stack, name: str, most: int, **options: Any) -> None:
    """No number of drafts changes the text, and some were drafted."""
    texts = {complete(stack, name, drafts, **options).choices[0].text for drafts in (0, 1, most)}
    assert len(texts) == 1
    assert stack.metric("vllm:spec_decode_num_draft_tokens_total") > 0


def check_survival(
    stack: Stack, name: str, drafts: int, plain: str, *, rank: int = 0, **options: Any
) -> None:
    """A killed worker changes no text; the one that takes its place drafts, too."""
    stream = complete(stack, name, drafts, stream=True, **options)
    assert read(stream, lambda: stack.kill_rank(rank)).text == plain
    drafted = stack.metric("vllm:spec_decode_num_draft_tokens_total")
    assert complete(stack, name, drafts, **options).choices[0].text == plain
    assert stack.metric("vllm:spec_decode_num_draft_tokens_total") > drafted
    assert stack.metric("surestep:drafter_broken") == 0
