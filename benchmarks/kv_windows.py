"""KV memory of a request to gpt-oss-120b: in groups of layers, and if all layers kept everything.

python benchmarks/kv_windows.py [--tokens N] [--step-tokens N] [--depth N] [--fp8-cache]

Arithmetic, not a measurement, with the objects by which the worker allocates and the scheduler
counts: the model's configuration as it was published, the worker's blocks, the scheduler's groups.
While a prompt is computed, layers with a window keep what the steps in flight compute, too.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import torch
from surestep_common.kv_groups import KVGroups
from surestep_kernels import KernelSet, load_kernels
from surestep_worker.cache.kv_cache import CACHE_DTYPES, KVSpec, bytes_per_block
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.models.gpt_oss.config import GptOssConfig

_MIB = 1 << 20
_BLOCK = 16
_PUBLISHED = {  # config.json of openai/gpt-oss-120b
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}


def published_spec(cache_dtype: torch.dtype | None) -> KVSpec:
    """Blocks of one rank that has the whole model."""
    config = GptOssConfig.parse(ConfigFiles(_PUBLISHED, {}))
    return KVSpec(
        windows=tuple(config.window_of(kind) for kind in config.layer_types),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=_BLOCK,
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
    )


def request_bytes(spec: KVSpec, kernels: KernelSet, num_tokens: int, row_tokens: int) -> int:
    """Bytes with which a request is computed, `row_tokens` of it by the steps in flight."""
    groups = KVGroups(spec.layout.windows, spec.block_size)
    return groups.blocks_of(num_tokens, row_tokens) * bytes_per_block(spec, kernels)


def main() -> None:
    """Print a line of JSON for each way to keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--step-tokens", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--depth", type=int, default=1, help="pipeline_depth")
    parser.add_argument("--fp8-cache", action="store_true")
    options = parser.parse_args()
    kernels = load_kernels("cpu", "reference")
    spec = published_spec(CACHE_DTYPES["fp8" if options.fp8_cache else "auto"])
    whole = replace(spec, windows=(0,) * len(spec.windows))
    in_flight = options.step_tokens * (options.depth + 1)
    for name, kept in (("in groups", spec), ("all layers alike", whole)):
        mib = {
            when: round(request_bytes(kept, kernels, options.tokens, rows) / _MIB, 1)
            for when, rows in (("decoding_mib", 1), ("prompt_mib", in_flight))
        }
        print(json.dumps({"kept": name, "tokens": options.tokens, **mib}))


if __name__ == "__main__":
    main()
