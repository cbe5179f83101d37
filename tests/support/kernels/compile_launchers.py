"""Compiles what the launchers would launch on a GPU that need not be there; run as a program.

    PYTHONPATH=... TRITON_INTERPRET=0 python compile_launchers.py [--full] [--ops NAME...] \\
        [--share I OF] [--cases MODULE] [--programmatic-dependent-launch]

The launchers get tensors without memory, and a driver that knows its target and nothing else. A
line of JSON says which Triton compiles, and one more for each variant of a kernel what it takes:
registers of a thread, bytes of its stack (what registers were spilled to), bytes of shared memory,
matrix instructions, of how many the first operand comes from registers, what decides the order of
its reductions: which thread holds which element, how it is launched, and what it does before it
waits for earlier kernels although it must not; or the error that it ended in.

The interpreter accepts much that the compiler does not: variables that change their type in a loop,
for one. It replaces kernels where they are defined, hence a process of its own without it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from support.kernels.compile_launch import Launch
from surestep_kernels.columns.gpu.dependent_launch import use_dependent_launches
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
# Registers of the sums, then those of the operand; one from shared memory is a descriptor.
_REGISTER_OPERAND = re.compile(r"wgmma\.mma_async\.sync[^{]*\{[^}]*\},\s*\{")
# An instruction of a listing, with its predicate, and all its parts but the operands.
_INSTRUCTION = re.compile(r"^ +/\*[0-9a-f]{4,}\*/ +((?:@!?U?P\w+ )?[A-Z][\w.]*)", re.MULTILINE)
_WAIT = "ACQBULK"  # griddepcontrol.wait
# Loads and stores, atomics, bulk copies, cache control; and whatever may not be done or may jump,
# for the wait has to be on every way to what stands behind it. Constants (LDC) are the arguments.
_NOT_BEFORE_IT = re.compile(r"@|LD(?!C)|ST|ATOM|RED|U?BLK|UTMA|CCTL|BR|J|CALL|RET|EXIT")
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Driver:
    """Of a GPU that is not there."""

    def get_current_device(self) -> int:
        """There is one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """There is one."""
        return device

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return TARGET

    def get_active_torch_device(self) -> torch.device:
        """Where tensors lie that Triton makes itself."""
        return torch.device("cpu")


class Usage(NamedTuple):
    """What a program of a kernel takes."""

    registers: int
    stack: int
    shared: int


class Compiler:
    """In place of Triton's launches: compiles, and tells of every variant once."""

    def __init__(self) -> None:
        self.case = ""
        self._run: Callable[..., Any] = JITFunction.run
        self._told: list[Any] = []  # kept, so that identities stay theirs

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Never launches, whatever `warmup` says."""
        began, about = time.perf_counter(), {"kernel": kernel.__name__, "case": self.case}
        try:
            made = self._run(kernel, *args, grid=grid, warmup=True, **options)
        except Exception as error:  # noqa: BLE001 whatever a compiler ends in is its result
            tell(about | {"error": f"{type(error).__name__}: {error}"[-2000:]})
            return
        if any(made is told for told in self._told):
            return
        self._told.append(made)
        if "ptx" not in made.asm:  # of a cache that holds machine code alone
            return
        about |= {"warps": made.metadata.num_warps, "stages": made.metadata.num_stages}
        listing = machine_code(made)
        about |= usage(made, listing)._asdict()
        about |= {"launch_pdl": made.metadata.launch_pdl, "before_wait": before_wait(listing)}
        found = set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync\S*", made.asm["ptx"]))
        about["register_operands"] = len(_REGISTER_OPERAND.findall(made.asm["ptx"]))
        seconds = round(time.perf_counter() - began, 2)
        about |= {"instructions": sorted(found), "reductions": reductions(made.asm["ttgir"])}
        tell(about | {"seconds": seconds})


def machine_code(made: Any) -> str:
    """A listing, behind what it uses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(BINARIES / "cuobjdump"), "-res-usage", "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def usage(made: Any, listing: str) -> Usage:
    """From the machine code."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    assert found, listing
    return Usage(int(found[1]), int(found[2]), made.metadata.shared)


def before_wait(listing: str) -> list[str]:
    """Instructions that stand before the wait for earlier kernels and must not; or that there is
    no wait."""
    found = list[str]()
    for instruction in _INSTRUCTION.findall(listing):
        if instruction == _WAIT:
            return found
        if _NOT_BEFORE_IT.match(instruction):
            found.append(instruction)
    return [*found, "no wait"]


def reductions(ttgir: str) -> list[str]:
    """What is reduced, and which thread holds which element of it."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    found = re.findall(r"^ *\}\) : \(tensor<(\w+), (.+?)>\) -> ", ttgir, re.MULTILINE)
    named = set[str]()
    for shape, at in found:
        layout = re.sub(r"#\w+", lambda alias: layouts.get(alias[0], alias[0]), at)
        named.add(f"{shape} {layout}")
    return sorted(named)


def tell(line: dict[str, Any]) -> None:
    """As soon as it is known."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def chosen(
    module: str, *, full: bool, ops: list[str] | None, share: tuple[int, int]
) -> Iterator[Launch]:
    """What is launched; of several processes each has its share."""
    mine, count = share
    every = importlib.import_module(module).launches(full=full)
    launches = (one for one in every if ops is None or one.op in ops)
    yield from islice(launches, mine, None, count)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true", help="all sizes")
    parser.add_argument("--ops", nargs="*", help="these alone")
    parser.add_argument("--share", nargs=2, type=int, default=(0, 1), metavar=("I", "OF"))
    parser.add_argument(
        "--cases", default="support.kernels.compile_cases", help="a module with launches()"
    )
    parser.add_argument("--programmatic-dependent-launch", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    driver.set_active(Driver())
    use_dependent_launches(enabled=args.programmatic_dependent_launch)
    compiler = Compiler()
    JITFunction.run = lambda kernel, *a, **options: compiler.launch(kernel, *a, **options)
    tell({"triton": triton.__version__, "target": f"sm_{TARGET.arch}"})
    for launch in chosen(args.cases, full=args.full, ops=args.ops, share=args.share):
        compiler.case = launch.name
        launch.run()


if __name__ == "__main__":
    main()
