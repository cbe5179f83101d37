from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.kernels import matrix_instructions
from support.kernels.cases import make_quantized
from support.kernels.matrix_instructions import Width
from surestep_kernels import PackedLinear
from surestep_kernels.columns.products import probe as asked
from surestep_kernels.columns.products.probe import identity, probe
from surestep_kernels.columns.products.probe_results import ProbeResult
from surestep_kernels.linear import WeightFormat, pack_linear_reference
from surestep_kernels.linear.sequential import TILES, sequential_linear
from surestep_kernels.linear.triton import pack_quantized
from torch import Tensor

CPU = torch.device("cpu")
K = matrix_instructions.K
# Few enough for the interpreter: one tile of each kind of instruction, all borders but the last.
FEW_TILES = (TILES[0], TILES[1], TILES[-1])


@pytest.fixture
def small(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if gpu != "cpu":
        pytest.skip("asks a card that the interpreter plays")
    monkeypatch.setattr(asked, "TILES", FEW_TILES)
    monkeypatch.setattr(asked, "BORDERS", (8, 32))
    monkeypatch.setattr(asked, "_ROWS", 34)
    monkeypatch.setattr(asked, "_SHAPE", (10, 40))
    monkeypatch.setattr(asked, "PIECE", 2)
    monkeypatch.setattr(asked, "MOST_PIECES", 2)


def weights(bias: Tensor | None = None) -> list[PackedLinear]:
    return [pack_linear_reference(torch.randn(17, 48).bfloat16(), bias)]


def ask(of: Sequence[PackedLinear] = ()) -> ProbeResult:
    return probe(of, CPU, lambda: True)


@pytest.mark.usefixtures("small")
def test_a_card_whose_instructions_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix_instructions.install(monkeypatch)
    result = ask(weights(torch.randn(24)))
    assert result == ProbeResult("", frozenset())
    assert result.equal


MUTANTS: dict[str, Width] = {
    "wide tiles take two instructions' products at once": lambda m, n: 2 * K if n == 256 else K,
    "mma takes half of them": lambda m, n: K // 2 if m == 16 else K,
    "mma takes half of them for 32 rows": lambda m, n: K // 2 if (m, n) == (16, 32) else K,
    "wgmma of few columns is another one": lambda m, n: 2 * K if (m, n) == (64, 16) else K,
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("format_", [WeightFormat.FP8, WeightFormat.INT4, WeightFormat.MXFP4])
@pytest.mark.parametrize("alike", [True, False])
def test_narrow_instructions_serve_quantised_weights_if_they_add_alike(
    monkeypatch: pytest.MonkeyPatch, format_: WeightFormat, alike: bool
) -> None:
    monkeypatch.setattr(asked, "_PAIRS", asked._PAIRS[:1])
    other = MUTANTS["wgmma of few columns is another one"]
    matrix_instructions.install(monkeypatch, *(() if alike else (other,)))
    result = ask([*weights(), pack_quantized(make_quantized(format_, 64, 128, 32))])
    assert result.narrow == alike
    assert not ask(weights()).narrow


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_card_on_which_one_tile_rounds_otherwise_is_found_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix_instructions.install(monkeypatch, MUTANTS[name])
    result = ask()
    assert result.unequal.startswith("ordinary weights by ordinary numbers: ")
    assert not result.equal
    assert result.finished


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("pair", asked._PAIRS[:3], ids=str)
def test_each_kind_of_numbers_shows_it(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix_instructions.install(monkeypatch, MUTANTS["mma takes half of them"])
    monkeypatch.setattr(asked, "_PAIRS", (pair,))
    assert ask().unequal


@pytest.mark.usefixtures("small")
def test_the_models_own_weights_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix_instructions.install(monkeypatch, MUTANTS["mma takes half of them"])
    monkeypatch.setattr(asked, "_PAIRS", ())
    assert ask(weights()).unequal.startswith("weight of 17 by 48")


@pytest.mark.usefixtures("small")
def test_a_tile_that_rows_get_is_asked_about_even_if_the_table_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nine rows and more have one of 32, alone among those that the small table leaves."""
    monkeypatch.setattr(asked, "TILES", FEW_TILES[1:])
    matrix_instructions.install(monkeypatch, MUTANTS["mma takes half of them for 32 rows"])
    assert ask().unequal.endswith(": 9 rows")


@pytest.mark.usefixtures("small")
def test_cublas_is_asked_at_all_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix_instructions.install(monkeypatch)
    monkeypatch.setattr(asked, "_PAIRS", ())
    monkeypatch.setattr(asked, "TILES", FEW_TILES[1:])
    seen, wrong = set[int](), set[int]()

    def fake(x: Tensor, transposed: Tensor) -> Tensor:
        seen.add(len(x))
        y = sequential_linear(x, pack_linear_reference(transposed.T.contiguous()))
        return y.nextafter(torch.full_like(y, torch.inf)) if len(x) in wrong else y

    monkeypatch.setattr(torch, "mm", fake)
    plain = weights()
    assert ask(plain).cublas == {(17, 48)}
    assert seen == {2, 4}
    wrong.add(4)
    result = ask(plain)
    assert result.equal
    assert result.cublas == frozenset()
    wrong.clear()
    assert ask(weights(torch.randn(17))).cublas == frozenset()


@pytest.mark.usefixtures("small")
def test_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix_instructions.install(monkeypatch)
    monkeypatch.setattr(asked, "TILES", FEW_TILES[1:2])
    for turns in range(2):
        left = iter(range(turns))
        result = probe((), CPU, lambda: next(left, None) is not None)  # noqa: B023
        assert not result.equal
        assert not result.finished


def test_this_card(gpu: str) -> None:
    """Whatever it says, it says in time, and rows of what it calls equal are."""
    if gpu == "cpu":
        pytest.skip("the interpreter's products are NumPy's")
    packed = pack_linear_reference(torch.randn(2048, 2048, device=gpu).bfloat16())
    result = probe([packed], torch.device(gpu), lambda: True)
    assert result.finished
    x = torch.randn(300, 2048, device=gpu).bfloat16()
    together = sequential_linear(x, packed)
    for count in (1, 7, 30, 60, 250) if result.equal else ():
        assert torch.equal(sequential_linear(x[-count:], packed), together[-count:])


def test_an_identity_is_that_of_card_software_and_weights() -> None:
    plain, biased = weights()[0], weights(torch.randn(17))[0]
    every = [identity(of, CPU) for of in ((), [plain], [biased], [plain, biased])]
    assert len({str(one) for one in every}) == 4
    assert identity([plain, biased], CPU) == identity([biased, plain], CPU)
    assert every[0]["triton"]
    assert every[0]["sources"]
