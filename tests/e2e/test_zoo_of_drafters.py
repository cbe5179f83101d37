"""`surestep zoo` finds nothing wrong with a hybrid that drafts with its MTP head, nor with gpt-oss
and an EAGLE-3 head.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console
from support.checkpoints import harmony
from support.checkpoints.eagle3 import make_reference, save_head
from support.checkpoints.gpt_oss import make_mxfp4_twins
from support.checkpoints.tiny_tokenizer import VOCAB_SIZE
from support.clients.harmony_cases import ids_of
from support.processes.stack import serve
from surestep_cli.zoo.command import Zoo

# Beside other servers some thirty cases, each of many requests, take several minutes.
pytestmark = [pytest.mark.timeout(900), pytest.mark.rotates(4)]

HYBRID = Path(__file__).parents[1] / "data" / "tiny-hybrid"
FLAGS = ("--max-num-seqs", "64", "--kv-cache-memory", "0.1", "--no-adaptive-draft-length")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
DEFAULT = CACHE / "surestep" / "models" / "SmolLM2-135M-Instruct.gguf"


class Served(NamedTuple):
    """A model, flags for its drafter and parsers, and cases that it must pass."""

    model: Path
    flags: tuple[str, ...]
    passes: tuple[str, ...]


def _flags(speculation: dict[str, object], reasoning: str, calls: str) -> tuple[str, ...]:
    parsers = "--reasoning-parser", reasoning, "--tool-call-parser", calls
    return *parsers, "--enable-auto-tool-choice", "--speculative-config", json.dumps(speculation)


def default(_: Path) -> Served:
    if not DEFAULT.exists():
        pytest.skip(f"no {DEFAULT}: `surestep fetch` downloads it")
    return Served(DEFAULT, ("--kv-cache-memory", "0.5"), ("json-at-once", "split-characters"))


def hybrid(_: Path) -> Served:
    speculation = {"method": "qwen3_5_mtp", "num_speculative_tokens": 4}
    flags = _flags(speculation, "qwen3", "hermes")
    return Served(HYBRID, flags, ("text-like-tools", "growing-chat"))


def gpt_oss(folder: Path) -> Served:
    stops = [ids_of([marker])[0] for marker in ("<|return|>", "<|call|>")]
    sizes: Any = {"max_position_embeddings": 4096, "intermediate_size": 96}  # 3 blocks in MXFP4
    model = make_mxfp4_twins(folder, vocab=VOCAB_SIZE, eos_token_ids=stops, **sizes).quantized
    harmony.save(model)
    head = save_head(folder / "head", make_reference(model), layer_ids=(1, 2, 4))
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4}
    return Served(model, _flags(speculation, "openai_gptoss", "openai"), ("stop-over-borders",))


@pytest.mark.parametrize("make", [hybrid, gpt_oss, default])
def test_nothing_is_wrong_with_ours(
    make: Callable[[Path], Served], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = make(tmp_path)
    with serve(served.model, tmp_path, *FLAGS, *served.flags) as stack:
        status = Zoo.load([stack.url, "--json"]).run(Console(stderr=True))
        drafted = stack.metric("vllm:spec_decode_num_draft_tokens_total")
    told = {one["case"]: one for one in json.loads(capsys.readouterr().out)["cases"]}
    wrong = {name: one["why"] for name, one in told.items() if one["verdict"] == "fail"}
    assert (status, wrong) == (0, {})
    assert drafted > 0
    for name in ("on-off", "company", *served.passes):
        assert told[name]["verdict"] == "pass", told[name]
    passed = {name for name, one in told.items() if one["verdict"] == "pass"}
    assert len(passed) > 17, {name: told[name]["why"] for name in told.keys() - passed}
