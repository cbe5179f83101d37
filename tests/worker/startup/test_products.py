"""Which family of products a rank takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.ports import free_address
from support.ranks.products import CASES, settle_main
from support.ranks.spawn import run
from surestep_kernels import KernelSet, PackedLinear, load_kernels
from surestep_kernels.columns.products import probe
from surestep_kernels.columns.products.families import Products
from surestep_kernels.columns.products.probe_results import ProbeResult
from surestep_kernels.dispatch import load_triton
from surestep_kernels.linear import pack_linear_reference
from surestep_kernels.linear.triton import ALL_WIDTHS
from surestep_proto import worker_pb2 as pb
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from surestep_worker.startup import products
from surestep_worker.startup.products import choose_products
from surestep_worker.step.heartbeat import Heartbeat

SPLITS, SEQUENTIAL = "triton", "triton_sequential"
SHAPE = 9, 16

Probe = Callable[[Sequence[PackedLinear], torch.device, Callable[[], bool]], ProbeResult]


def settle(folder: Path, backend: str = "auto", known: str | None = None) -> tuple[str, KernelSet]:
    """Of a rank that has loaded one weight."""
    kernels = load_triton(backend)
    assert isinstance(kernels.products, Products)
    kernels.products.register([pack_linear_reference(torch.ones(SHAPE).bfloat16())])
    facts = None if known is None else pb.ProfileResult(linear_backend=known)
    device, heartbeat = torch.device("cpu"), Heartbeat.local()
    choose_products(kernels, TensorParallel(), device, heartbeat, facts, folder)
    return kernels.linear_backend, kernels


def answers(patch: pytest.MonkeyPatch, *verdicts: ProbeResult | Exception) -> list[int]:
    """What the card says one time after the other; the list grows with each."""
    left, asked = iter(verdicts), list[int]()

    def answer(weights: Sequence[PackedLinear], *_: object, **__: object) -> ProbeResult:
        asked.append(len(weights))
        verdict = next(left)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    patch.setattr(probe, "probe", answer)
    return asked


def test_a_card_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, ProbeResult("", frozenset({SHAPE})))
    for _ in range(2):
        family, kernels = settle(tmp_path)
        assert family == SEQUENTIAL
        assert isinstance(kernels.products, Products)
        assert kernels.products._cublas == {SHAPE}
    assert asked == [1]


def test_an_unequal_card_has_the_family_of_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asked = answers(monkeypatch, ProbeResult("16 rows by some tile", frozenset({SHAPE})))
    for _ in range(2):
        family, kernels = settle(tmp_path)
        assert family == SPLITS
        assert isinstance(kernels.products, Products)
        assert kernels.products._cublas == frozenset()
    assert asked == [1]
    assert "products of this GPU: 16 rows by some tile" in caplog.text


@pytest.mark.parametrize(
    "problem", [RuntimeError("out of memory"), ProbeResult("", finished=False)]
)
def test_a_card_that_did_not_answer_is_asked_again(
    problem: ProbeResult | Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answers(monkeypatch, problem, ProbeResult(""))
    assert settle(tmp_path)[0] == SPLITS
    assert settle(tmp_path)[0] == SEQUENTIAL
    assert asked == [1, 1]


def test_narrow_instructions_are_taken_where_they_add_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the family is, and by whoever finds the result, too."""
    asked = answers(monkeypatch, ProbeResult("16 rows by some tile", narrow=True))
    for _ in range(2):
        _, kernels = settle(tmp_path)
        assert isinstance(kernels.products, Products)
        assert kernels.products.widths == ALL_WIDTHS
    assert asked == [1]


@pytest.mark.parametrize("family", [SPLITS, SEQUENTIAL])
def test_a_successor_takes_the_family_of_the_rank_before(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is kept, or is not, by then."""
    asked = answers(monkeypatch, ProbeResult("", frozenset({SHAPE})))
    assert settle(tmp_path, known=family)[0] == family
    assert asked == []
    assert settle(tmp_path)[0] == SEQUENTIAL
    after, kernels = settle(tmp_path, known=family)
    assert after == family
    assert isinstance(kernels.products, Products)
    assert kernels.products._cublas == ({SHAPE} if family == SEQUENTIAL else frozenset())
    assert asked == [1]


@pytest.mark.parametrize("backend", [SPLITS, SEQUENTIAL, "torch"])
def test_a_family_that_is_named_is_taken(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answers(monkeypatch)
    assert settle(tmp_path, backend)[0] == backend
    assert asked == []


def test_where_there_is_no_choice_nothing_is_named(tmp_path: Path) -> None:
    for kernels, name in ((load_kernels("cpu"), ""), (load_triton(), SPLITS)):
        alone, device = TensorParallel(), torch.device("cpu")
        choose_products(kernels, alone, device, Heartbeat.local(), folder=tmp_path)
        assert kernels.linear_backend == name


def test_time_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asks_on(
        of: Sequence[PackedLinear], device: torch.device, go_on: Callable[[], bool], **_: object
    ) -> ProbeResult:
        while go_on():
            pass
        return ProbeResult("", finished=False)

    monkeypatch.setattr(probe, "probe", asks_on)
    monkeypatch.setattr(products, "_PROBE_S", 0.01)
    assert settle(tmp_path)[0] == SPLITS


def test_the_weights_of_a_model_are_met_once_of_each_kind(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    kernels = load_triton()
    load_model(
        ModelSource(tmp_path), dtype="bfloat16", device="cpu", tp=TensorParallel(), kernels=kernels
    )
    assert isinstance(kernels.products, Products)
    met = kernels.products.weights
    assert len(met) == len({tuple(packed.data.shape) for packed in met}) == 5


@pytest.mark.rotates(3)
def test_ranks_take_one_family(tmp_path: Path) -> None:
    address = free_address()
    run(settle_main, [(rank, address, tmp_path) for rank in range(2)])
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first == dict(zip(CASES, (SEQUENTIAL, SPLITS, SPLITS), strict=True))
