"""A draft model that cannot be used costs the drafts, not the start; unless one is required."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from support.checkpoints.changes import change_config, change_tensors, cut_short
from support.checkpoints.drafting import add_noise
from support.checkpoints.embedders import make_tiny_embedder
from support.checkpoints.gguf_files import write_gguf
from support.checkpoints.hybrid import make_tiny_hybrid
from support.checkpoints.tiny import make_tiny_checkpoint
from support.checkpoints.tokenizer_kinds import KINDS
from support.processes.stack import own_cache
from support.ranks.small import check_only_drafts_are_lost, drafting
from surestep_worker.checkpoint.held_weights import HeldWeights
from surestep_worker.checkpoint.vocabulary import Vocabulary

VOCAB = 300  # all of them tokens


start = drafting(method="draft_model", num_speculative_tokens=2)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    model = make_tiny_checkpoint(tmp_path / "model", vocab=VOCAB, tokenizer=True)
    return model, add_noise(model, tmp_path / "draft", 0.02)


def instead(
    make: Callable[..., object], *, tokens: bool = True, **sizes: Any
) -> Callable[..., None]:
    """Another draft model, with the tokenizer of the first."""

    def replace(draft: Path) -> None:
        tokenizer = (draft / "tokenizer.json").read_bytes()
        shutil.rmtree(draft)
        make(draft, **{"vocab": VOCAB} | sizes)
        if tokens:
            (draft / "tokenizer.json").write_bytes(tokenizer)

    return replace


def tokenizer(draft: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = draft / "tokenizer.json"
    whole = json.loads(path.read_text())
    change(whole)
    path.write_text(json.dumps(whole))


def swap(draft: Path) -> None:
    def change(whole: dict[str, Any]) -> None:
        ids = whole["model"]["vocab"]
        one, other = (next(t for t, i in ids.items() if i == n) for n in (280, 290))
        ids[one], ids[other] = 290, 280

    tokenizer(draft, change)


def add_token(draft: Path) -> None:
    instead(make_tiny_checkpoint, vocab=VOCAB + 20)(draft)
    more = {"id": VOCAB, "content": "<more>", "special": True}
    tokenizer(draft, lambda whole: whole["added_tokens"].append(more))


def not_finite(draft: Path) -> None:
    change_tensors(draft, lambda weights: weights["lm_head.weight"].fill_(torch.nan))


def unknown(draft: Path) -> None:
    change_config(draft, architectures=["Nothing"])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (shutil.rmtree, "cannot read"),
    "cut short": (cut_short, "model.safetensors"),
    "unknown": (unknown, "unknown architecture 'Nothing'"),
    "tokens": (swap, "as token 280, the model has '"),
    "more tokens": (add_token, f"has '<more>' as token {VOCAB}, the model has none"),
    "no tokens": (lambda draft: tokenizer(draft, lambda whole: whole.pop("model")), "lists no"),
    "size": (instead(make_tiny_checkpoint, vocab=290, tokens=False), "290 tokens, the model has 3"),
    "headless": (instead(make_tiny_embedder), "has no output head: not served as a draft"),
    "heads": (instead(make_tiny_checkpoint, head_dim=20), "needs attention_backend torch"),
    "nan": (not_finite, "its logits are not finite"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_draft_model_that_is_broken(pair: tuple[Path, Path], fault: str) -> None:
    breaks, message = FAULTS[fault]
    breaks(pair[1])
    check_only_drafts_are_lost(partial(start, pair), message)


WORKS: dict[str, Callable[[Path], object]] = {
    "as it is": lambda draft: None,
    "more rows": instead(make_tiny_checkpoint, vocab=VOCAB + 20),
    "no tokenizer": lambda draft: (draft / "tokenizer.json").unlink(),
    "GGUF's padding": lambda draft: tokenizer(
        draft, lambda whole: whole["model"]["vocab"].update({f"[PAD{VOCAB}]": VOCAB})
    ),
    "short": instead(make_tiny_checkpoint, max_position=6),
    "recurrent": instead(make_tiny_hybrid),
    "GPT-2": instead(make_tiny_checkpoint, family="gpt2", max_position=6),
}


@pytest.mark.parametrize("how", WORKS)
def test_a_draft_model_that_works(pair: tuple[Path, Path], how: str) -> None:
    """A context that is shorter than the model's costs no error."""
    WORKS[how](pair[1])
    facts = start(pair, require_drafter=True).facts
    assert (facts.drafter, facts.max_draft_tokens, facts.drafter_fault) == ("draft_model", 2, "")
    assert facts.check_drafts > 20
    twin = how in ("as it is", "no tokenizer", "GGUF's padding")
    assert facts.check_accepted > 0.5 * facts.check_drafts or not twin


def test_a_gguf_file_drafts(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache(tmp_path / "cache")))
    file = tmp_path / "draft.gguf"
    write_gguf(pair[1], file, lambda name: GGMLQuantizationType.F32)
    facts = start((pair[0], file), require_drafter=True).facts
    assert (facts.drafter, facts.drafter_fault) == ("draft_model", "")
    assert facts.check_accepted > 0.5 * facts.check_drafts


def test_a_rank_that_follows_reads_no_file_of_the_draft_model(pair: tuple[Path, Path]) -> None:
    held = HeldWeights()
    first = start(pair, held=held)
    assert held.nbytes > os.fstat(held.fds.model).st_size > 0
    shutil.rmtree(pair[1])
    second = start(pair, first.profile_result, held)
    assert (second.facts.drafter, second.facts.drafter_fault) == ("draft_model", "")


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_library(tmp_path: Path, kind: str) -> None:
    made = KINDS[kind]()
    made.save(str(tmp_path / "tokenizer.json"))
    listed = {id_: token for token, id_ in made.get_vocab().items()}
    assert Vocabulary(tmp_path, 10**6).tokens() == listed
    assert Vocabulary(tmp_path, 20).tokens() == {i: listed[i] for i in range(20)}
