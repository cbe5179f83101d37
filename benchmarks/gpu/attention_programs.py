"""Programs that paged attention launches for decode steps, by arithmetic alone: no GPU is needed.

    PYTHONPATH=benchmarks python -m gpu.attention_programs [--out FILE]

Before: a program for each split that the longest context has room for, unless that makes too much
scratch or there are tiles enough, where one went through all splits of a row. Now: the launcher's
own grid, among whose shares all splits that there are get divided. A program that finds nothing to
do ends after it has read how long the rows are. Nothing here is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from surestep_kernels.paged_attention.grid import SPLIT, Batch, grid_of

from gpu.sizes import MODELS, Sizes

MAX_MODEL_LEN = 131072
CONTEXTS, ROWS = (1024, 131072), (1, 32, 256)
OUT = Path(__file__).parents[1] / "results" / "gpu_attention_programs.json"


class Programs(NamedTuple):
    """Programs of a layer's attention in one decode step."""

    launches: int
    attend: int
    merge: int
    busy: int  # of those that attend: with work to do
    most: int  # splits of one of them


def before(rows: int, context: int, s: Sizes) -> Programs:
    """Count them as the launcher had them."""
    splits, used = -(-MAX_MODEL_LEN // SPLIT), -(-context // SPLIT)
    scratch = rows * s.heads * splits * (s.head_dim + 2) * 4
    if rows * s.kv_heads < 264 and scratch <= 256 << 20:
        apart, busy = rows * splits * s.kv_heads, rows * used * s.kv_heads
        return Programs(2, apart, rows * s.kv_heads, busy, 1)
    return Programs(1, rows * s.kv_heads, 0, rows * s.kv_heads, used)


def after(rows: int, context: int, s: Sizes) -> Programs:
    """Count them as it has them; without scratch, a program goes through all splits of a row."""
    batch = Batch(rows, rows, 1, MAX_MODEL_LEN, s.heads, s.kv_heads, s.head_dim)
    grid, used = grid_of(batch), -(-context // SPLIT)
    attend, merge = grid.programs_of(batch)
    apart = min(rows, grid.lines // used)  # rows
    splits, whole = apart * used, rows - apart
    most = -(-splits // grid.shares) + -(-whole // grid.shares) * used
    busy = min(grid.shares, max(splits, whole)) * s.kv_heads
    return Programs(2, math.prod(attend), math.prod(merge), busy, most)


def table() -> list[dict[str, Any]]:
    """Return a line for each model with attention, context and number of rows."""
    sizes = [s for s in MODELS if s.rows]
    return [
        {
            "model": s.name,
            "max_model_len": MAX_MODEL_LEN,
            "context": context,
            "rows": rows,
            "before": before(rows, context, s)._asdict(),
            "after": after(rows, context, s)._asdict(),
        }
        for s, context, rows in product(sizes, CONTEXTS, ROWS)
    ]


def main() -> None:
    """Write the table, and show it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="file of the results")
    args = parser.parse_args()
    lines = table()
    text = ",\n".join(json.dumps(line) for line in lines)
    args.out.write_text(f"[\n{text}\n]\n")
    sys.stdout.write("model, context, rows: launches, attend, merge, busy, most splits of one\n")
    for line in lines:
        of = ", ".join(str(line[name]) for name in ("model", "context", "rows"))
        was, now = (", ".join(map(str, line[name].values())) for name in ("before", "after"))
        sys.stdout.write(f"{of}: before {was}; after {now}\n")


if __name__ == "__main__":
    main()
