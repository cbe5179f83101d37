"""Memory that a model takes: weights, keys and values of a token, recurrent state of a request.

python benchmarks/memory.py [FOLDER ...] [--ranks N] [--gib GIB] [--num-drafts K] [--fp8-cache]

Arithmetic, not a measurement: of models in folders, and of published sizes in bfloat16. The
formulas are those by which the worker allocates (a test compares them with loaded models). `--gib`
is the memory of one rank; of what the weights leave free there, 0.85 are taken for caches.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import torch
from surestep_common.kv_groups import ALL, KVGroups
from surestep_kernels import load_kernels
from surestep_worker.cache.kv_cache import CACHE_DTYPES, KVSpec, LatentWidths, bytes_per_block
from surestep_worker.cache.recurrent import RecurrentSpec
from surestep_worker.configs.model_config import PAGED, resolve_dtype
from surestep_worker.models import ModelSource
from surestep_worker.models.deepseek.config import DeepseekConfig
from surestep_worker.models.hybrid.config import HybridConfig

_GIB, _MIB, _KIB = 1 << 30, 1 << 20, 1 << 10
_CACHES = 0.85  # of what is left: the rest is for activations
_BLOCK = 16
_CONTEXTS = (1024, 4096, 32768)  # tokens, prompt and answer


class Sizes(NamedTuple):
    """What of a model takes memory, on all ranks together."""

    weight_bytes: float
    windows: tuple[int, ...]  # of attention layers: positions that a token sees, 0 = all
    kv_heads: int
    head_dim: int
    hidden_size: int  # kept of each token for an MTP head; 0 = there is none
    dtype: torch.dtype
    recurrent: RecurrentSpec | None
    latents: tuple[LatentWidths, ...] = ()  # of layers that keep these, the same on every rank

    def kv_spec(self, ranks: int, cache_dtype: torch.dtype | None) -> KVSpec:
        """Of one rank; each has a whole head at least."""
        return KVSpec(
            windows=self.windows + (0,) * bool(self.hidden_size),
            num_kv_heads=max(1, self.kv_heads // ranks),
            head_dim=self.head_dim,
            block_size=_BLOCK,
            dtype=self.dtype,
            cache_dtype=cache_dtype,
            kept_hidden=self.hidden_size,
            latents=self.latents,
        )


def delta(layers: int, k_heads: int, v_heads: int, dim: int = 128, taps: int = 4) -> RecurrentSpec:
    """Layers of the gated delta rule, on one rank."""
    return RecurrentSpec(
        num_layers=layers,
        num_k_heads=k_heads,
        num_v_heads=v_heads,
        k_dim=dim,
        v_dim=dim,
        taps=taps,
        dtype=torch.bfloat16,
    )


_BF16 = torch.bfloat16
_GLM = (LatentWidths(576, 128),) * 78
_PUBLISHED = {
    "Llama-3.1-8B": Sizes(16.1e9, (0,) * 32, 8, 128, 0, _BF16, None),
    "Qwen3-8B": Sizes(16.4e9, (0,) * 36, 8, 128, 0, _BF16, None),
    "Qwen3-32B": Sizes(65.5e9, (0,) * 64, 8, 128, 0, _BF16, None),
    "gpt-oss-120b": Sizes(65.2e9, (128, 0) * 18, 8, 64, 0, _BF16, None),  # experts in MXFP4
    "Qwen3-Next-80B-A3B": Sizes(159e9, (0,) * 12, 2, 256, 2048, _BF16, delta(36, 16, 32)),
    "GLM-5.1-FP8": Sizes(756e9, (0,) * 78, 64, 256, 0, _BF16, None, _GLM),
    "DeepSeek-V3": Sizes(689e9, (0,) * 61, 128, 192, 0, _BF16, None, (LatentWidths(576, 0),) * 61),
}


def of_folder(folder: Path, *, mtp: bool) -> Sizes:
    """Of a checkpoint as it is stored. Raises InvalidRequest."""
    source = ModelSource(folder)
    config = source.config
    linear = None
    if isinstance(config, HybridConfig):
        linear = config.recurrent_spec(resolve_dtype("auto", config))
    windows = tuple(config.window_of(kind) for kind in config.layer_types if kind in PAGED)
    mtp = mtp and (linear is not None or isinstance(config, DeepseekConfig))
    return Sizes(
        weight_bytes=sum(entry.nbytes for entry in source.entries.values()),
        windows=windows,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size if mtp else 0,
        dtype=resolve_dtype("auto", config),
        recurrent=linear,
        latents=config.latent_widths(len(windows) + mtp),
    )


def figures(
    sizes: Sizes, ranks: int, gib: float, num_drafts: int, *, fp8: bool
) -> dict[str, object]:
    """Of one rank; `requests` are those whose tokens, and states, have room at once."""
    kernels = load_kernels("cpu", "reference")
    kv = sizes.kv_spec(ranks, CACHE_DTYPES["fp8" if fp8 else "auto"])
    block, groups = bytes_per_block(kv, kernels), KVGroups(kv.layout.windows, _BLOCK)
    spec, weights = sizes.recurrent, sizes.weight_bytes / ranks
    state = spec.slot_bytes(num_drafts + 1) / ranks if spec is not None else 0
    snapshot = spec.snapshot_bytes / ranks if spec is not None else 0
    left = max(0.0, (gib * _GIB - weights) * _CACHES)
    blocks = {tokens: groups.blocks_of(tokens) for tokens in _CONTEXTS}
    return {
        "weights_gib": round(weights / _GIB, 2),
        "kv_kib_per_token": round(block * _whole(groups) / _BLOCK / _KIB, 2),
        "kv_mib_per_request": {tokens: round(n * block / _MIB, 2) for tokens, n in blocks.items()},
        "state_mib_per_request": round(state / _MIB, 1),
        "snapshot_mib": round(snapshot / _MIB, 1),
        "caches_gib": round(left / _GIB, 1),
        "requests": {tokens: int(left // (n * block + state)) for tokens, n in blocks.items()},
    }


def _whole(groups: KVGroups) -> int:
    """Count the groups whose blocks are kept for every token."""
    return groups.windows.count(ALL)


def main() -> None:
    """Print a line of JSON for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--gib", type=float, default=72.0, help="0.9 of a GPU with 80 GiB")
    parser.add_argument("--num-drafts", type=int, default=3)
    parser.add_argument("--fp8-cache", action="store_true")
    options = parser.parse_args()
    models = dict(_PUBLISHED)
    if options.folders:
        models = {p.name: of_folder(p, mtp=options.num_drafts > 0) for p in options.folders}
    for name, sizes in models.items():
        found = figures(
            *(sizes, options.ranks, options.gib, options.num_drafts), fp8=options.fp8_cache
        )
        print(json.dumps({"model": name, "ranks": options.ranks, "gib": options.gib, **found}))


if __name__ == "__main__":
    main()
