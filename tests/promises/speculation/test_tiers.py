"""Prefixes from tiers behind the pool change nothing: tokens and log-probabilities, bit for bit.

Every text is asked for again from each of its lengths, by a scheduler that knows of no block. What
its prompt has in common with an earlier one comes from the tiers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.parity.bench import (
    BLOCK_SIZE,
    HEAD,
    Neighbours,
    ParityBench,
    make_draft_model,
    make_eagle3_gpt_oss,
    make_gpt_oss,
    make_hybrid,
    make_model,
    same,
)
from support.parity.cases import NEUTRAL, TOTAL_LEN, Probe, make_request
from support.parity.latent_models import make_deepseek_v3, make_glm_dsa
from support.parity.local_engine import Answer, LocalEngine, one_rank
from surestep_scheduler.core.sequence import Request
from surestep_worker.cache.cache_memory import CacheMemory
from surestep_worker.host import shared_memory
from surestep_worker.startup.built import Built
from surestep_worker.tiers import entry
from surestep_worker.tiers.entry import HEAD_BYTES, EntryForm
from surestep_worker.tiers.folder import FolderTier
from surestep_worker.tiers.host import HostTier
from surestep_worker.tiers.moves import Moves
from surestep_worker.tiers.stack import Stack
from surestep_worker.tiers.tier import Tier

WHERE = Neighbours(num_slots=4, step_tokens=24)
MOST = 1 << 30
KINDS: dict[str, tuple[Callable[[Path], None], str, int]] = {
    "dense": (make_model, "ngram", 4),
    "hybrid with MTP": (make_hybrid, "mtp", 3),
    "windows": (make_gpt_oss, "none", 0),
    "windows and EAGLE-3": (make_eagle3_gpt_oss, HEAD, 3),
    "latents": (make_deepseek_v3, "mtp", 2),
    "chosen latents": (make_glm_dsa, "mtp", 2),
    "draft model": (make_draft_model, "draft_model", 3),
}


def no_requests(probe: Probe) -> list[Request]:
    return []


class Ranks:
    """Ranks of a model, one after the other, with the same tiers behind each."""

    def __init__(self, kind: str, folder: Path) -> None:
        make, drafter, k = KINDS[kind]
        self._drafts = drafter, k
        self._bench = ParityBench(folder / "model", make, no_requests)
        self._folder, self._form = folder / "tier", EntryForm.of(kind)
        self._host = HostTier(MOST)
        self._epoch = 0

    def start(self, *places: str) -> Built:
        """A rank that has these tiers."""
        memory = CacheMemory(shared_memory.create("surestep-test"))
        built = self._bench.rank(WHERE, *self._drafts, memory)
        built.runner.context.caches.held.verify(b"i" * 32)  # type: ignore[union-attr]
        if places:
            far: list[Tier] = [FolderTier(self._folder, MOST, self._form)]
            near = self._host if "host" in places else None
            stack = Stack(self._form, near, far if "folder" in places else [])
            built.runner.moves = Moves(built.runner.context.caches, lambda: stack)
            built.facts.tiers.extend(places)
        return built

    def serve(self, built: Built, requests: list[Request]) -> tuple[dict[str, Answer], int]:
        """Answers by a scheduler that knows of no block, and the tokens that tiers had."""
        self._epoch += 1
        runner = built.runner
        step = one_rank(runner, self._epoch)
        sizes: Any = {"max_num_batched_tokens": WHERE.step_tokens, "epoch": self._epoch}
        engine = LocalEngine(step, built.facts, moves=runner.moves, **sizes)
        return engine.run(requests), engine.state.counters.tier_hits


def end(built: Built) -> None:
    """End a rank, with everything written."""
    assert built.runner.moves is not None
    built.runner.moves.close(30)


def asked(name: str, prompt: list[int]) -> Request:
    params = {"temperature": 0.7, "seed": 11, "want_logprobs": True, "num_top_logprobs": 2}
    return make_request(name, prompt, params | NEUTRAL)


@pytest.mark.parametrize("places", [("folder",), ("host",), ("host", "folder")])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rotates(3, always=("folder-dense", "folder-hybrid"))
def test_hits_at_every_offset(kind: str, places: tuple[str, ...], tmp_path: Path) -> None:
    ranks = Ranks(kind, tmp_path)
    first = ranks.start(*places)
    answers, hits = ranks.serve(first, [asked("whole", [5, 9, 13])])
    assert hits == 0
    end(first)
    text = [5, 9, 13, *answers["whole"].token_ids]
    assert len(text) == TOTAL_LEN
    second, plain = ranks.start(*places), ranks.start()
    found = dict[int, int]()
    for length in range(1, TOTAL_LEN - 1):
        request = asked(str(length), text[:length])
        answer, found[length] = ranks.serve(second, [request])
        expected, _ = ranks.serve(plain, [request])
        assert same(answer[str(length)], expected[str(length)]), length
    end(second)
    if "hybrid" in kind:  # where a state was left: every border, from the second request on
        assert sum(count > 0 for count in found.values()) > TOTAL_LEN // 2
    else:
        assert all(found[length] == (length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in found)


def corrupt(folder: Path) -> None:
    """Flip a bit of every file, of an exponent."""
    for path in folder.rglob("*.*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            for at in range(HEAD_BYTES + 3, len(data), 4):
                data[at] ^= 8
            path.write_bytes(data)


def answers_of_corrupted(tmp_path: Path) -> tuple[dict[str, Answer], dict[str, Answer], int]:
    """Answers with tiers all of whose files are wrong, those without, and the tokens loaded."""
    ranks, requests = Ranks("dense", tmp_path), [asked("long", list(range(3, 33)))]
    first = ranks.start("folder")
    ranks.serve(first, requests)
    end(first)
    corrupt(tmp_path / "tier")
    second = ranks.start("folder")
    answers, hits = ranks.serve(second, requests)
    end(second)
    expected, _ = ranks.serve(ranks.start(), requests)
    return answers, expected, hits


def test_wrong_bytes_are_never_used(tmp_path: Path) -> None:
    answers, expected, hits = answers_of_corrupted(tmp_path)
    assert hits == 0
    assert same(answers["long"], expected["long"])


def test_wrong_bytes_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that trusts every file answers something else."""
    monkeypatch.setattr(entry, "_checksums", lambda payload: (0, 0))
    answers, expected, hits = answers_of_corrupted(tmp_path)
    assert hits > 0
    assert not same(answers["long"], expected["long"])
