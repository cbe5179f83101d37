"""Servers of the fault suite: what they are started with, and which tests use which."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from support.checkpoints.deepseek import make_tiny_glm_fp8
from support.checkpoints.tiny import make_tiny_checkpoint
from support.faults.cases import GLM, SETUPS, TURNS, Setup, turn_of

_HYBRID = Path(__file__).parents[2] / "data" / "tiny-hybrid"
_SPECULATION = {
    "ngram": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}',
    "mtp": '{"method": "qwen3_5_mtp", "num_speculative_tokens": 3}',
    "glm": '{"method": "mtp", "num_speculative_tokens": 2}',
}
_OF_GLM = ("--enable-expert-parallel", "--kv-cache-dtype", "fp8", "--enable-prefix-caching")


def flags(setup: Setup) -> list[str]:
    """For `surestep serve`."""
    ranks = ["--tensor-parallel-size", str(setup.ranks)]
    if setup.speculation == "none":
        return ranks
    drafts = ["--speculative-config", _SPECULATION[setup.speculation]]
    own = _OF_GLM if setup == GLM else ()
    return [*ranks, *drafts, *own, "--no-adaptive-draft-length"]


def model(setup: Setup, folder: Path) -> Path:
    """A trained hybrid with its MTP head, or a random GLM or Llama, always the same, in `folder`."""
    if setup.speculation == "mtp":
        return _HYBRID
    if setup == GLM:
        return make_tiny_glm_fp8(folder / "tiny", max_position=2048)
    return make_tiny_checkpoint(folder / "tiny", "llama", seed=7, tokenizer=True, max_position=1024)


def served_by(setups: Iterable[str]) -> pytest.MarkDecorator:
    """The test runs against the servers of these setups, each where the share has its faults."""
    named = {str(setup): setup for setup in SETUPS}
    marks = {name: pytest.mark.rotates(len(TURNS), turn=turn_of(name)) for name in setups}
    params = [pytest.param(named[name], id=name, marks=mark) for name, mark in marks.items()]
    return pytest.mark.parametrize("served", params, indirect=True, scope="session")
