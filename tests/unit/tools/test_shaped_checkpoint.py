"""Checkpoints of published shapes, shrunk: they load, and the engine steps through them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from make_shaped_checkpoint import SHAPES, main
from support.parity.bench import NEIGHBOURS, serve, total
from support.parity.cases import NEUTRAL, make_request
from support.parity.local_engine import one_rank
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.linear import Sharding
from surestep_worker.models.hybrid.config import HybridConfig
from surestep_worker.models.hybrid.table import parameter_table
from surestep_worker.startup.build import build_runner
from surestep_worker.step.runner import Runner

GREEDY = {"temperature": 0.0, **NEUTRAL}
REQUESTS = [make_request(str(i), [i + 3, *range(9, 17)], GREEDY) for i in (0, 1)]


@pytest.mark.parametrize(("shape", "drafter"), [("tiny-llama", "ngram"), ("tiny-qwen3.5", "mtp")])
def test_a_shaped_checkpoint_is_served(tmp_path: Path, shape: str, drafter: str) -> None:
    main([shape, str(tmp_path)])
    where = NEIGHBOURS["near max_model_len"]

    def tokens(config: dict[str, Any] | None) -> tuple[list[list[int]], int]:
        settings = WorkerSettings(
            model=tmp_path,
            dtype="float32",
            max_num_seqs=where.num_slots,
            max_model_len=where.max_model_len,
            kv_cache_memory=0.01,
            speculative_config=config,
        )
        built = build_runner(settings)
        step = one_rank(Runner(built.runner.context))
        found = serve(step, built.facts, REQUESTS, where, depth=1)
        return [found[request.id].token_ids for request in REQUESTS], total(found, "num_drafts")

    plain, _ = tokens(None)
    drafted, num_drafts = tokens({"method": drafter, "num_speculative_tokens": 2})
    assert drafted == plain
    assert num_drafts > 0
    assert all(plain)


def test_the_published_hybrid_has_4_billion_parameters(tmp_path: Path) -> None:
    """Without its vision tower, which takes the rest of the 4.5 billion that are published."""
    shape = SHAPES["qwen3.5-4b"]
    shape.config(**shape.sizes, architectures=["Qwen3_5ForCausalLM"]).save_pretrained(tmp_path)
    config = HybridConfig.parse(ConfigFiles.read(tmp_path))
    shard = Sharding(TensorParallel(), expert_parallel=False)
    table = parameter_table(config, shard, set(), draft_head=False)
    count = sum(math.prod(parameter.shape) for parameter in table.values())
    assert 4.15e9 < count < 4.25e9
    assert config.layer_types.count("full_attention") == 8
