"""Adapters with drafts: tokens are those of peft with each adapter alone, whatever runs beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from support.checkpoints.adapters import (
    DENSE,
    EXPERTS,
    Asked,
    make_adapter,
    make_old_adapter,
    peft_answers,
)
from support.checkpoints.compressed import PRESETS, compressed_twins, scheme
from support.checkpoints.gguf_files import write_gguf
from support.checkpoints.gpt_oss import make_mxfp4_twins
from support.checkpoints.quantize import Twins, quantize, round_plain
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.bench import (
    make_branches,
    make_eagle3,
    make_gpt_oss,
    make_hybrid,
    make_model,
    make_small,
    total,
)
from support.parity.cases import EOS, VOCAB
from support.parity.local_engine import Answer, LocalEngine, one_rank
from support.ranks.small import start_small
from surestep_common.invariants import LedgerError
from surestep_common.tenants import cache_root
from surestep_kernels.linear import ROUNDINGS
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb
from surestep_scheduler.core.sequence import Adapter, Request
from surestep_worker.adapters.kernels import AdaptedRows
from surestep_worker.checkpoint.held_weights import HeldWeights
from surestep_worker.startup.built import Built
from torch import Tensor

COUNT = 20  # tokens of an answer
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def make_phi3(folder: Path) -> None:
    """Its merged layers have one adapter each."""
    sizes: Any = {"vocab": VOCAB, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 48}
    make_tiny_checkpoint(folder, "phi3", seed=7, **sizes)


# What makes a checkpoint, what of it adapters have, and what drafts.
MODELS: dict[str, tuple[Callable[[Path], None], list[str], dict[str, Any]]] = {
    "llama": (make_model, DENSE, NGRAM),
    "phi3": (make_phi3, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], NGRAM),
    "gemma": (partial(make_branches, name="gemma2"), DENSE, NGRAM),
    "mixtral": (partial(make_small, "mixtral"), [*ATTENTION, *EXPERTS], NGRAM),
    "qwen3_moe": (partial(make_small, "qwen3_moe"), [*DENSE, *EXPERTS, "mlp.gate.weight"], NGRAM),
    "gpt_oss": (make_gpt_oss, [*ATTENTION, *EXPERTS], NGRAM),
    "experts by transformers": (partial(make_small, "olmoe"), [*ATTENTION, *EXPERTS], NGRAM),
    "old": (partial(make_small, "mixtral"), [], NGRAM),
    "by transformers": (partial(make_small, "cohere"), DENSE, NGRAM),
    "mtp": (
        make_hybrid,
        [*ATTENTION, *EXPERTS, "in_proj_qkvz", "in_proj_ba", "out_proj"],
        {"method": "mtp", "num_speculative_tokens": 3},
    ),
    "eagle3": (
        make_eagle3,
        DENSE,
        {"method": "eagle3", "num_speculative_tokens": 3, "model": "eagle3"},
    ),
}


@dataclass
class Bench:
    """A checkpoint with three adapters, and what requests of all answer by peft."""

    model: Path
    adapters: list[Path]
    drafter: dict[str, Any]
    held: HeldWeights
    plain: Path | None = None  # what the weights stand for, where they are packed

    def rank(self, drafter: dict[str, Any], profile: bytes = b"", **settings: Any) -> Built:
        """A rank, the one before which may have left adapters."""
        how = {"dtype": "float32", "enable_lora": True, "max_lora_rank": 16} | settings
        return start_small(self.model, profile, self.held, speculative_config=drafter, **how)

    def load(self, rank: Built) -> list[Adapter]:
        """Load all at places that are no index of theirs."""
        pool = rank.runner.adapters
        wanted = [
            pb.Adapter(name=folder.name, place=5 - number, path=str(folder))
            for number, folder in enumerate(self.adapters)
        ]
        told = [pool.load(one) for one in wanted]
        return [Adapter(one.name, one.place, one.digest) for one in told]

    def answers(self, asked: Sequence[Request]) -> dict[str, list[int]]:
        """By request; those that stop are cut there."""
        found = dict[str, list[int]]()
        for adapter in {one.adapter for one in asked}:
            folder = next((f for f in self.adapters if adapter and f.name == adapter.name), None)
            mine = {one.id: _asked(one) for one in asked if one.adapter == adapter}
            told = peft_answers(self.plain or self.model, folder, [*mine.values()], COUNT)
            found |= {name: _until_stop(told[one]) for name, one in mine.items()}
        return found


def _asked(request: Request) -> Asked:
    sampling = request.sampling
    return Asked(tuple(request.prompt_ids), round(sampling.temperature, 3), sampling.seed)


def _until_stop(ids: list[int]) -> list[int]:
    return ids[: ids.index(EOS) + 1] if EOS in ids else ids


def requests(adapters: Sequence[Adapter | None]) -> list[Request]:
    """Greedy and seeded ones, with the same prompts for all."""
    made = list[Request]()
    for number, prompt in enumerate(([9, 10, 11, 9, 10, 11, 9], [*range(20, 38)])):
        for adapter in adapters:
            for temperature in (0.0, 0.7):
                sampling = sampling_pb2.SamplingParams(
                    temperature=temperature, seed=5 + number, top_p=1, repetition_penalty=1
                )
                made.append(
                    Request(
                        id=f"{adapter and adapter.name} {number} {temperature}",
                        prompt_ids=prompt,
                        emitted_ids=[],
                        max_tokens=COUNT,
                        stop_ids=frozenset([EOS]),
                        adapter=adapter,
                        sampling=sampling,
                    )
                )
    return made


def answers(rank: Built, asked: Sequence[Request]) -> dict[str, Answer]:
    return LocalEngine(one_rank(rank.runner), rank.facts).run(asked)


def tokens(found: dict[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.token_ids for name, answer in found.items()}


def make_bench(kind: str, folder: Path) -> Bench:
    make, targets, drafter = MODELS[kind]
    model = folder / "model"
    make(model)
    write = partial(make_adapter, targets=targets) if targets else make_old_adapter
    adapters = [
        write(model, folder / f"adapter {seed}", seed=seed, rank=rank)
        for seed, rank in enumerate((1, 8, 5))
    ]
    if "model" in drafter:
        drafter = drafter | {"model": str(model / drafter["model"])}
    return Bench(model, adapters, drafter, HeldWeights(model))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench("llama", tmp_path_factory.mktemp("adapted"))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.rotates(2, always=("llama", "mtp"))
def test_tokens_are_those_of_peft_alone(kind: str, tmp_path: Path) -> None:
    """With and without drafts, and after another rank has come."""
    bench = make_bench(kind, tmp_path)
    rank = bench.rank(bench.drafter)
    asked = requests([None, *bench.load(rank)])
    expected = bench.answers(asked)
    assert len({tuple(one) for one in expected.values()}) > len(asked) / 2
    found = answers(rank, asked)
    assert tokens(found) == expected
    assert total(found, "num_drafts")
    later = bench.rank(bench.drafter, rank.profile_result)
    assert [one.name for one in later.runner.adapters.held()] == [
        folder.name for folder in reversed(bench.adapters)
    ]
    again = answers(later, asked)
    assert tokens(again) == expected
    plain = answers(bench.rank({}), asked)
    assert tokens(plain) == expected
    assert not total(plain, "num_drafts")


def with_logprobs(asked: Sequence[Request]) -> list[Request]:
    for one in asked:
        one.sampling.want_logprobs = True
    return [replace(one, want_logprobs=True) for one in asked]


def check_company(bench: Bench, rank: Built, asked: Sequence[Request], **settings: Any) -> None:
    """Check that answers together with drafts, and alone without, are the same bit by bit."""
    asked = with_logprobs(asked)
    together = answers(rank, asked)
    for one in asked[::3]:
        later = bench.rank({}, rank.profile_result, **settings)
        alone, other = answers(later, [one])[one.id], together[one.id]
        assert (alone.token_ids, alone.logprobs) == (other.token_ids, other.logprobs)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_row_has_the_same_bits_in_any_company(kind: str, tmp_path: Path) -> None:
    bench = make_bench(kind, tmp_path)
    rank = bench.rank(bench.drafter)
    asked = requests([None, *bench.load(rank)])
    check_company(bench, rank, asked)


def _others_rows(rows: AdaptedRows, places: Tensor | None) -> Any:
    return _OF_STEP(rows, None if places is None else places.roll(1))


def _one_cache(request: Request) -> bytes:
    return cache_root(request.cache_owner, request.cache_salt)


_OF_STEP = AdaptedRows.of_step
MUTANTS: dict[str, tuple[type, str, Any]] = {
    "rows of other adapters": (AdaptedRows, "of_step", _others_rows),
    "a cache for all adapters": (Request, "cache_root", property(_one_cache)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_row_and_a_shared_cache_are_caught(
    llama: Bench, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = llama.rank(llama.drafter)
    asked = requests([None, *llama.load(rank)])
    monkeypatch.setattr(*MUTANTS[mutant])
    assert tokens(answers(rank, asked)) != llama.answers(asked)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["unloaded", "at another's place"])
def test_an_adapter_that_is_not_there_is_refused(llama: Bench, elsewhere: bool) -> None:
    rank = llama.rank({})
    first, second, _ = llama.load(rank)
    rank.runner.adapters.unload(first.place)
    wrong = first._replace(place=second.place) if elsewhere else first
    with pytest.raises(LedgerError, match="the request is to have"):
        answers(rank, requests([wrong])[:1])


def test_a_plan_that_names_another_adapter_is_refused(llama: Bench) -> None:
    rank = llama.rank({})
    first, second, _ = llama.load(rank)

    def wrong(plan: pb.StepPlan) -> list[pb.StepResult]:
        plan.adapter[0] = 1 + second.place
        return [rank.runner.step(plan)]

    rank.runner.open(1)
    with pytest.raises(LedgerError, match=f"row of adapter {1 + second.place}"):
        LocalEngine(wrong, rank.facts).run(requests([first])[:1])


class Packed(NamedTuple):
    """A checkpoint with packed weights, a plain one of what these stand for, and a setting."""

    twins: Twins
    settings: dict[str, Any]


def _rounded(name: str, source: Path) -> Packed:
    return Packed(Twins(source, round_plain(source, ROUNDINGS[name])), {"quantization": name})


def _stored(method: str, source: Path) -> Packed:
    return Packed(quantize(source, method), {})


def _compressed(preset: str, source: Path) -> Packed:
    schemes = {"": (scheme(preset, 32), PRESETS[preset])}
    return Packed(compressed_twins(source, schemes, torch.float32), {})


def _gguf(source: Path) -> Packed:
    return Packed(write_gguf(source, source.with_suffix(".gguf"), lambda name: Type.Q4_1), {})


def _experts(source: Path) -> Packed:
    how: Any = {"vocab": VOCAB, "eos_token_ids": (EOS,), "seed": 7}
    return Packed(make_mxfp4_twins(source.with_name("experts"), **how), {})


PACKED: dict[str, Callable[[Path], Packed]] = {
    **{name: partial(_rounded, name) for name in ("int8", "int4")},
    **{method: partial(_stored, method) for method in ("fp8", "awq", "gptq")},
    **{preset: partial(_compressed, preset) for preset in ("MXFP4", "W4A16", "W4A16_ASYM")},
    "gguf": _gguf,
    "experts": _experts,
}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.rotates(3, always=("awq", "gguf"))
def test_adapters_beside_packed_weights(kind: str, tmp_path: Path) -> None:
    """Tokens are those of peft over what the weights stand for: shares are not rounded with them.
    Merged projections are packed too."""
    source = tmp_path / "model"
    sizes: Any = {"vocab": VOCAB, "hidden": 64, "heads": 2, "kv_heads": 1, "intermediate": 128}
    make_tiny_checkpoint(source, seed=7, **sizes)
    (packed, plain), settings = PACKED[kind](source)
    targets = [*ATTENTION, *EXPERTS] if kind == "experts" else DENSE
    adapters = [
        make_adapter(plain, tmp_path / f"adapter {seed}", seed=seed, rank=rank, targets=targets)
        for seed, rank in enumerate((1, 8))
    ]
    bench = Bench(packed, adapters, NGRAM, HeldWeights(packed), plain)
    rank = bench.rank(NGRAM, **settings)
    asked = requests([None, *bench.load(rank)])
    found, expected = answers(rank, asked), bench.answers(asked)
    assert tokens(found) == expected
    assert total(found, "num_drafts")
    assert len({tuple(one) for one in expected.values()}) > len(asked) / 2
    later = bench.rank(NGRAM, rank.profile_result, **settings)
    assert len(later.runner.adapters.held()) == len(adapters)
    check_company(bench, later, asked, **settings)
