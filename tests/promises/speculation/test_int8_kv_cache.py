"""An INT8 KV cache, with a scale for each position and head; see test_kv_cache_dtypes.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.parity.latent_models import make_glm_dsa
from support.parity.rank_trial import RankTrial, short_requests
from surestep_common.errors import InvalidRequest

RANK = RankTrial(short_requests(3, (0.0, 0.0, 0.7, 0.7)), {"kv_cache_dtype": "int8"})


def test_the_same_memory_holds_more_blocks(dense: Path) -> None:
    """The fingerprint says what they hold: no successor with other pages is taken for the same."""
    room: dict[str, Any] = {"max_num_seqs": 128, "kv_cache_memory": 0.001}
    wide, narrow = (RANK.build(dense, kv_cache_dtype=n, **room).facts for n in ("auto", "int8"))
    assert 2 * wide.num_blocks < narrow.num_blocks < 4 * wide.num_blocks
    assert narrow.dtype == wide.dtype == "float32"
    assert wide.model_fingerprint != narrow.model_fingerprint
    assert narrow.model_fingerprint.endswith("int8")


def test_latents_have_no_such_form(tmp_path: Path) -> None:
    make_glm_dsa(tmp_path)
    with pytest.raises(InvalidRequest, match="this model caches latents") as raised:
        RANK.build(tmp_path)
    assert raised.value.param == "kv_cache_dtype"
