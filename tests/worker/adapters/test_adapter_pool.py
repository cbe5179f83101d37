"""The pool of a rank, beside a model of what must be in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.checkpoints.adapters import DENSE, EXPERTS, make_adapter
from support.checkpoints.gpt_oss import make_tiny_gpt_oss
from support.checkpoints.tiny import make_tiny_checkpoint
from surestep_common.errors import InvalidRequest
from surestep_kernels import PackedLinear
from surestep_kernels.moe import PackedExperts
from surestep_kernels.table import REFERENCE
from surestep_proto import worker_pb2 as pb
from surestep_worker.adapters.folder import TENSORS
from surestep_worker.adapters.kernels import AdaptedKernels, with_adapters
from surestep_worker.adapters.pool import AdapterPool, Sizes
from surestep_worker.cache.cache_memory import CacheMemory
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.host import shared_memory
from surestep_worker.models import ModelSource, load_model
from torch import Tensor

PLACES, MOST = 3, 6
TP = TensorParallel()


class Adapted:
    """The products of a checkpoint on one rank, and folders of adapters."""

    def __init__(self, folder: Path) -> None:
        self.model = make_tiny_checkpoint(folder / "model", layers=1)
        ranks = ((1, DENSE), (MOST, DENSE), (3, ["v_proj", "down_proj"]))
        self.folders = [
            make_adapter(self.model, folder / f"a{i}", seed=i, rank=rank, targets=targets)
            for i, (rank, targets) in enumerate(ranks)
        ]
        self.kernels = with_adapters(REFERENCE)
        source = ModelSource(self.model)
        load_model(source, dtype="float32", device="cpu", tp=TP, kernels=self.kernels)
        self.fd = shared_memory.create("adapters")

    def pool(self, *, most: int = MOST) -> AdapterPool:
        memory = CacheMemory(os.dup(self.fd))
        sizes, device = Sizes(PLACES, most), torch.device("cpu")
        return AdapterPool(self.kernels.rows, sizes, torch.float32, device, memory)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"))


def shares(kernels: AdaptedKernels, packed: PackedLinear, places: list[int]) -> Tensor:
    """What adapters at these places add to a product of one and the same row."""
    x = torch.linspace(-1, 1, packed.in_features).repeat(len(places), 1)
    with kernels.rows.of_step(torch.tensor(places, dtype=torch.int32)):
        return kernels.linear(x, packed) - kernels.plain.linear(x, packed)


def expected(folder: Path, module: str, inputs: int) -> Tensor | None:
    tensors = load_file(folder / TENSORS)
    at = f"base_model.model.model.layers.0.{module}.lora_"
    if f"{at}A.weight" not in tensors:
        return None
    a, b = tensors[f"{at}A.weight"], tensors[f"{at}B.weight"]
    return torch.linspace(-1, 1, inputs) @ a.T @ b.T * (6 / len(a))


ACTIONS = st.one_of(
    st.tuples(st.just("load"), st.integers(0, PLACES - 1), st.integers(0, 2)),
    st.tuples(st.just("unload"), st.integers(0, PLACES - 1), st.just(0)),
    st.tuples(st.just("another rank"), st.just(0), st.just(0)),
    st.tuples(st.just("a stray write"), st.integers(0, PLACES - 1), st.just(0)),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(actions=st.lists(ACTIONS, max_size=12))
def test_a_place_holds_what_was_loaded_last(
    adapted: Adapted, actions: list[tuple[str, int, int]]
) -> None:
    pool, held, torn = adapted.pool(), dict[int, int](), set[int]()
    for place in range(PLACES):
        pool.unload(place)
    for action, place, which in actions:
        if action == "load":
            wanted = pb.Adapter(name=f"a{which}", place=place, path=str(adapted.folders[which]))
            loaded = pool.load(wanted)
            held[place] = which
            torn -= {place}
            assert pool.digest_at(place) == loaded.digest
        elif action == "unload":
            pool.unload(place)
            held.pop(place, None)
        elif action == "a stray write" and place in held:
            next(iter(pool._products.values())).host.ranks[place] += 1
            torn.add(place)
        elif action == "another rank":
            pool = adapted.pool()
            held = {at: one for at, one in held.items() if at not in torn}
            torn.clear()
    assert [(one.place, one.name) for one in pool.held()] == [
        (at, f"a{held[at]}") for at in sorted(held)
    ]
    check_products(adapted, {at: one for at, one in held.items() if at not in torn})


def check_products(adapted: Adapted, held: dict[int, int]) -> None:
    """Rows of all places, and one without an adapter, in one product."""
    products, places = adapted.kernels.rows.products, [-1, *held]
    attention = products["0.mixer.qkv"].packed
    made = dict(zip(places, shares(adapted.kernels, attention, places), strict=True))
    assert not made[-1].any()
    for place, which in held.items():
        parts = made[place].split([64, 32, 32])
        for part, name in zip(parts, ("q_proj", "k_proj", "v_proj"), strict=True):
            wanted = expected(adapted.folders[which], f"self_attn.{name}", 64)
            wanted = torch.zeros_like(part) if wanted is None else wanted
            torch.testing.assert_close(part, wanted, atol=2e-5, rtol=1e-4)


def refused(adapted: Adapted, folder: Path, message: str, place: int = 0, digest: str = "") -> None:
    pool = adapted.pool()
    before = pool.held()
    with pytest.raises(InvalidRequest, match=message):
        pool.load(pb.Adapter(name="x", place=place, path=str(folder), digest=digest))
    assert pool.held() == before


def test_what_does_not_fit_is_refused_and_changes_nothing(adapted: Adapted, tmp_path: Path) -> None:
    first = adapted.folders[0]
    adapted.pool().load(pb.Adapter(name="a0", place=0, path=str(first)))
    other = make_tiny_checkpoint(tmp_path / "other", layers=2, hidden=32)
    refused(adapted, make_adapter(other, tmp_path / "b"), "modules that this model has not")
    other = make_tiny_checkpoint(tmp_path / "narrow", layers=1, hidden=32)
    refused(
        adapted, make_adapter(other, tmp_path / "c"), r"q_proj \[32, 32\] instead of \[64, 64\]"
    )
    head = make_adapter(adapted.model, tmp_path / "d", targets=["lm_head"])
    refused(adapted, head, "lm_head")
    big = make_adapter(adapted.model, tmp_path / "e", rank=MOST + 1)
    refused(adapted, big, f"more than --max-lora-rank {MOST}")
    refused(adapted, first, "no place", place=PLACES)
    refused(adapted, first, "holds another adapter than before", digest="0")
    tensors = load_file(first / TENSORS)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, big / TENSORS)
    refused(adapted, big, "not finite")


def test_a_pool_of_other_sizes_begins_empty(adapted: Adapted) -> None:
    adapted.pool().load(pb.Adapter(name="a0", place=1, path=str(adapted.folders[0])))
    assert adapted.pool().held()
    assert not adapted.pool(most=MOST + 2).held()


SPARSE: dict[str, Callable[[Path], Path]] = {
    "mixtral": partial(make_tiny_checkpoint, family="mixtral", layers=1, num_local_experts=4),
    "gpt_oss": partial(make_tiny_gpt_oss, num_hidden_layers=1, layer_types=["full_attention"]),
}


def mixed(model: Path, adapter: Path, tp: TensorParallel, *, expert_parallel: bool) -> Tensor:
    """What a rank's experts make of tokens that use all, every other one with the adapter."""
    packed = list[PackedExperts]()

    def pack(*args: Any, **how: Any) -> PackedExperts:
        packed.append(REFERENCE.pack_experts(*args, **how))
        return packed[0]

    kernels = with_adapters(replace(REFERENCE, pack_experts=pack))
    how: Any = {"dtype": "float32", "device": "cpu", "expert_parallel": expert_parallel}
    load_model(ModelSource(model), tp=tp, kernels=kernels, **how)
    pool = AdapterPool(kernels.rows, Sizes(1, 2), torch.float32, torch.device("cpu"), None)
    pool.load(pb.Adapter(path=str(adapter)))
    experts = torch.arange(4).repeat(6, 1)
    x = torch.randn(6, packed[0].down[0].out_features, generator=torch.Generator().manual_seed(1))
    total, weights = torch.zeros_like(x), torch.full((6, 4), 0.25)
    with kernels.rows.of_step(torch.tensor([-1, 0] * 3, dtype=torch.int32)):
        kernels.moe(total, x, weights, experts, packed[0])
    return total


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["columns", "experts"])
@pytest.mark.parametrize("kind", SPARSE)
def test_ranks_share_out_adapters_of_experts(
    kind: str, expert_parallel: bool, tmp_path: Path
) -> None:
    model = SPARSE[kind](tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter", rank=2, targets=EXPERTS)
    run = partial(mixed, model, adapter, expert_parallel=expert_parallel)
    shares = [run(TensorParallel(rank, 2, cast(Any, object()))) for rank in range(2)]
    torch.testing.assert_close(sum(shares), run(TP), atol=2e-4, rtol=1e-5)


def test_stacks_of_other_experts_are_refused(tmp_path: Path) -> None:
    models = [
        make_tiny_checkpoint(tmp_path / f"{n}", "mixtral", layers=1, num_local_experts=n)
        for n in (4, 3)
    ]
    adapter = make_adapter(models[1], tmp_path / "adapter", rank=2, targets=EXPERTS)
    with pytest.raises(InvalidRequest, match="does not fit 4 experts of 96 columns"):
        mixed(models[0], adapter, TP, expert_parallel=False)
