"""Every kernel, as its launcher would launch it, compiles for sm_90 and takes no more than it may.

Limits are those of the machine code that the Triton of this environment makes; scripts/gpu_compile
asks the oldest that pyproject.toml admits and the newest.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import surestep_kernels
from gpu.cases import OPS
from support.kernels import compile_cases

REPORTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_compile"
PROGRAM = Path(compile_cases.__file__).with_name("compile_launchers.py")
KERNEL = re.compile(r"^@triton\.jit[^\n]*\ndef (_\w+_kernel)\(", re.MULTILINE)
SHARES = ({"paged_attention", "logits", "moe"}, OPS.keys() - {"paged_attention", "logits", "moe"})
SEQUENTIAL = "_sequential_linear_kernel"
PLAIN = r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.bf16\.bf16"
SWAPPED = r"wgmma\.mma_async\.sync\.aligned\.m64n64k(16\.f32\.bf16\.bf16|32\.f32\.e4m3\.e4m3)"
WIDTHS = SWAPPED.replace("n64", "n(16|32|64)")  # where they are known to add alike
INSTRUCTIONS = {
    "_plain_linear_kernel": PLAIN,
    "_linear_kernel": SWAPPED,
    "_experts_kernel": SWAPPED,
    "_multiply_heads_kernel": SWAPPED,
}
REGISTER_OPERANDS = (
    "_linear_kernel",
    "_experts_kernel",
    "_multiply_heads_kernel",
)  # of weights that are quantised
OF_PARTS = (  # which add up splits, and then what threads share
    "_add_rms_norm_kernel",
    "_project_heads_kernel",
    "_route_tokens_kernel",
    "_mix_experts_kernel",
)
REGISTERS = 65536  # of a multiprocessor of sm_90


class Limit(NamedTuple):
    """Bound of what a program takes, and how many are to fit a multiprocessor's registers."""

    stack: int  # bytes of a thread: what registers were spilled to
    shared: int  # bytes
    programs: int


SMALL = Limit(stack=0, shared=16 << 10, programs=4)
ATTEND = Limit(stack=0, shared=112 << 10, programs=1)
# Of a kernel, or of any, in cases that are named so: the first that fits.
LIMITS = (
    ("", "tiny: ", Limit(stack=1 << 10, shared=112 << 10, programs=1)),  # 16 divides no size
    ("_attend_kernel", "float32", Limit(stack=5 << 10, shared=128 << 10, programs=1)),
    # Four warps have the sum of a tile of 64 queries, and where rows may be long that of all splits
    # before: what does not fit lies on the stack. Eight warps do all of it twice, and were slower.
    ("_attend_kernel", "D=256", ATTEND._replace(stack=1280)),
    ("_attend_kernel", "D=128", ATTEND._replace(stack=320)),
    ("_attend_kernel", "D=96", ATTEND._replace(stack=320)),
    ("_attend_kernel", "", ATTEND),
    # Two steps of 64 latents and the queries; a thread has the addresses of what it loads of both.
    # Triton 3.6 spills more than 3.9, most where FP8 is widened on its way.
    ("_attend_latents_kernel", "float32", Limit(stack=16 << 10, shared=128 << 10, programs=1)),
    ("_attend_latents_kernel", "float8", Limit(stack=1536, shared=112 << 10, programs=1)),
    ("_attend_latents_kernel", "", Limit(stack=512, shared=168 << 10, programs=1)),
    ("_score_positions_kernel", "float32", Limit(stack=8 << 10, shared=64 << 10, programs=1)),
    ("_score_positions_kernel", "", SMALL._replace(shared=32 << 10)),
    # A program has all scores of a token.
    ("_choose_positions_kernel", "", SMALL._replace(shared=72 << 10, programs=1)),
    ("_plain_linear_kernel", "", Limit(stack=0, shared=112 << 10, programs=1)),
    (SEQUENTIAL, "", Limit(stack=0, shared=144 << 10, programs=1)),
    ("_sum_splits_kernel", "", SMALL._replace(programs=8)),
    # Few: a program has a whole row, and as many threads as may read its splits.
    ("_add_rms_norm_kernel", "", Limit(stack=0, shared=40 << 10, programs=1)),
    ("_mix_experts_kernel", "", Limit(stack=0, shared=40 << 10, programs=1)),
    ("_linear_kernel", "", Limit(stack=0, shared=112 << 10, programs=1)),
    # A list of 4096 candidates lies in the registers of 16 warps; there is one program per row.
    ("_settle_kernel", "", SMALL._replace(programs=1)),
    ("_gather_kernel", "", SMALL._replace(programs=2)),
    # So do the groups of a row, of which there is one program too.
    ("_collect_kernel", "", SMALL._replace(programs=2)),
    ("_draw_kernel", "", SMALL._replace(programs=2)),
    ("_experts_kernel", "", Limit(stack=0, shared=112 << 10, programs=1)),
    ("_multiply_heads_kernel", "", Limit(stack=0, shared=112 << 10, programs=1)),
    ("_chunk_matrices_kernel", "", Limit(stack=0, shared=72 << 10, programs=1)),
    # Triton 3.6 spills nothing, 3.9 does.
    ("_run_chunks_kernel", "", Limit(stack=256, shared=112 << 10, programs=1)),
)


def compile_all(*, full: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what compile_launchers.py says of its compiler and each variant; two run at a time."""
    options = ["--programmatic-dependent-launch", *(["--full"] if full else [])]
    begun = [_begin(*options, "--ops", *ops) for ops in SHARES]
    lines = [_finish(process) for process in begun]
    return lines[0][0], [variant for share in lines for variant in share[1:]]


def _begin(*arguments: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "TRITON_INTERPRET": "0"}
    # What the environment puts first, as another Triton, stays in front.
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environ["PYTHONPATH"] = os.pathsep.join((*paths, *(path for path in sys.path if path)))
    command = [sys.executable, str(PROGRAM), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True)


def _finish(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, err = process.communicate()
    assert process.returncode == 0, err[-2000:]
    return [json.loads(line) for line in out.splitlines()]


def beyond(variant: dict[str, Any]) -> list[str]:
    """Limits that a variant does not keep."""
    kernel, case = variant["kernel"], variant["case"]
    limit = next((of for name, part, of in LIMITS if name in ("", kernel) and part in case), SMALL)
    programs = REGISTERS // (32 * variant["warps"] * -(-variant["registers"] // 8) * 8)
    found = {
        "stack": variant["stack"] > limit.stack,
        "shared": variant["shared"] > limit.shared,
        "registers": programs < limit.programs,
    }
    return [name for name, is_beyond in found.items() if is_beyond]


def all_kernels() -> set[str]:
    """Return the names of those that are defined for GPUs."""
    (folder,) = surestep_kernels.__path__
    return {
        name for path in Path(folder).rglob("*.py") for name in KERNEL.findall(path.read_text())
    }


def test_the_reports_are_of_all_kernels() -> None:
    """Compare those of the oldest Triton and of a newer one, as scripts/gpu_compile writes them."""
    reports = [json.loads(path.read_text()) for path in REPORTS.glob("*.json")]
    assert len({report["compiler"]["triton"] for report in reports}) == 2
    for report in reports:
        assert {variant["kernel"] for variant in report["variants"]} == all_kernels()


@pytest.mark.timeout(1800)
@pytest.mark.rotates(4, turn=0)
def test_every_kernel_compiles_within_its_limits(pytestconfig: pytest.Config) -> None:
    compiler, variants = compile_all(full=pytestconfig.getoption("--full"))
    folder = pytestconfig.getoption("--compile-report")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{compiler['target']}-triton-{compiler['triton']}.json"
        path.write_text(report(compiler, variants))
    assert [variant for variant in variants if "error" in variant] == []
    assert {variant["kernel"] for variant in variants} == all_kernels()
    assert [(variant, names) for variant in variants if (names := beyond(variant))] == []
    assert [variant for variant in variants if variant["before_wait"]] == []
    assert all(variant["launch_pdl"] for variant in variants)
    # Few rows and many are multiplied by one instruction, those of fp32 by none.
    for variant in variants:
        if variant["kernel"] in INSTRUCTIONS:
            exact, other = "float32" in variant["case"], "width of 3" in variant["case"]
            wanted = INSTRUCTIONS[variant["kernel"]] if not other else WIDTHS
            found = variant["instructions"]
            assert len(found) == (not exact), variant
            assert all(re.fullmatch(wanted, name) for name in found), variant
        if variant["kernel"] in REGISTER_OPERANDS:
            shared_operand = "bf16" in variant["case"] or "float32" in variant["case"]
            assert (variant["register_operands"] > 0) == (not shared_operand), variant
    # Tiles of the family that adds along K differ in that, which is what a card is asked about.
    found = {i for v in variants if v["kernel"] == SEQUENTIAL for i in v["instructions"]}
    assert all("k16.f32.bf16.bf16" in i or "m16n8k16.row.col.f32.bf16.bf16" in i for i in found)
    assert len(found) > 1
    assert orders_by_parts(variants) == {}


@pytest.mark.timeout(300)
@pytest.mark.rotates(1)
def test_what_does_not_wait_first_for_earlier_kernels_is_found() -> None:
    _, *variants = _finish(_begin("--cases", "support.kernels.early_kernels"))
    assert {variant["kernel"]: bool(variant["before_wait"]) for variant in variants} == {
        "_waiting_kernel": False,
        "_loading_kernel": True,
        "_storing_kernel": True,
        "_leaving_kernel": True,
        "_never_waiting_kernel": True,
    }
    assert not any(variant["launch_pdl"] for variant in variants)  # which nobody asked for


def orders_by_parts(variants: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Sums of squares that threads share in more than one way.

    Few rows come as parts of a product and many as a whole: they must not be added up differently.
    """
    found = dict[str, set[str]]()
    for variant in variants:
        if variant["kernel"] in OF_PARTS:
            for reduction in variant["reductions"]:
                shape, _, layout = reduction.partition(" ")
                exact = "float32" in variant["case"]
                found.setdefault(f"{variant['kernel']} {shape} {exact}", set()).add(layout)
    assert len(found) > 1
    return {name: layouts for name, layouts in found.items() if len(layouts) > 1}


def test_two_orders_of_one_sum_are_found() -> None:
    lay = "1x2048xf32 #ttg.blocked<{sizePerThread = [1, %d]}>"
    few = {"kernel": "_add_rms_norm_kernel", "case": "M=1", "reductions": [lay % 4]}
    heads = few | {"kernel": "_project_heads_kernel", "case": "M=1", "reductions": [lay % 8]}
    assert orders_by_parts([few, few | {"case": "M=512"}, heads]) == {}
    many = few | {"case": "M=512", "reductions": [lay % 8]}
    assert list(orders_by_parts([few, many, heads])) == ["_add_rms_norm_kernel 1x2048xf32 False"]


def report(compiler: dict[str, Any], variants: list[dict[str, Any]]) -> str:
    """JSON with a line for each variant, in the order of kernels; seconds are nobody's."""
    kept = ({k: v for k, v in variant.items() if k != "seconds"} for variant in variants)
    ordered = sorted(kept, key=lambda variant: (variant["kernel"], variant["case"]))
    lines = ",\n".join(json.dumps(variant) for variant in ordered)
    return f'{{"compiler": {json.dumps(compiler)},\n"variants": [\n{lines}\n]}}\n'


def test_what_takes_too_much_is_found() -> None:
    modest = {"kernel": "_rotary_kernel", "case": "a prompt", "warps": 4, "registers": 40}
    modest |= {"stack": 0, "shared": 0}
    assert beyond(modest) == []
    assert beyond(modest | {"stack": 8}) == ["stack"]
    assert beyond(modest | {"shared": 17 << 10}) == ["shared"]
    assert beyond(modest | {"warps": 8, "registers": 65}) == ["registers"]
    assert beyond(modest | {"kernel": "_run_chunks_kernel", "stack": 8}) == []
