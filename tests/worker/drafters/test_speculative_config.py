"""--speculative-config: what is understood, and how the rest is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.parity.drafters import NO_CONTEXT
from surestep_common.errors import InvalidRequest
from surestep_worker.drafters import DRAFTERS
from surestep_worker.drafters import registry as registry_module
from surestep_worker.drafters.config import SpeculativeConfig
from surestep_worker.drafters.ngram import NgramDrafter


def test_reads_vllms_keys() -> None:
    config = SpeculativeConfig.from_json(
        '{"method": "ngram", "num_speculative_tokens": 4,'
        ' "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
    )
    assert (config.num_speculative_tokens, config.prompt_lookup_max, config.prompt_lookup_min) == (
        4,
        3,
        1,
    )
    assert isinstance(DRAFTERS.get(config.method)(config, NO_CONTEXT), NgramDrafter)


@pytest.mark.parametrize("name", ["mtp", "qwen3_next_mtp", "qwen3_5_mtp"])
def test_knows_vllms_names_of_the_mtp_head(name: str) -> None:
    config = SpeculativeConfig(method=name, num_speculative_tokens=2)
    assert (config.method, config.draft_temperature) == ("mtp", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"method": "eagle9", "num_speculative_tokens": 4}',
            "unknown speculative method 'eagle9'; known: ",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 17}',
            "num_speculative_tokens: Input should be less",
        ),
        ('{"method": "ngram", "num_speculative_tokens": -1}', "num_speculative_tokens: "),
        ('{"method": "ngram"}', "num_speculative_tokens is missing"),
        (
            '{"method": "ngram", "num_speculative_tokens": 2, "lookup": 3}',
            "lookup: Extra inputs are not",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 1}',
            "prompt_lookup_min must not exceed prompt_lookup_max",
        ),
        ("{", "Invalid JSON"),
        ("[]", "should be an object"),
    ],
)
def test_refuses_by_name(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SpeculativeConfig.from_json(text)
    assert message in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.param == "speculative_config"


def test_importing_the_config_loads_no_torch() -> None:
    """The command line reads it at start-up."""
    code = "import sys, surestep_worker.drafters.config; sys.exit('torch' in sys.modules)"
    paths = [path for path in sys.path if path]
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(paths)}
    )


def test_finds_out_what_a_draft_model_is(tmp_path: Path) -> None:
    """As vLLM does by its name, or by what its config.json says."""
    named = SpeculativeConfig.from_json('{"model": "x/EAGLE3-y", "num_speculative_tokens": 3}')
    assert named.method == "eagle3"
    about = {
        "speculators_model_type": "eagle3",
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]},
    }
    (tmp_path / "config.json").write_text(json.dumps(about))
    found = SpeculativeConfig.from_json(json.dumps({"model": str(tmp_path)}))
    assert (found.method, found.num_speculative_tokens, found.model) == ("eagle3", 5, str(tmp_path))
    block = {"architectures": ["DFlashDraftModel"], "block_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(block))
    found = SpeculativeConfig.from_json(json.dumps({"model": str(tmp_path)}))
    assert (found.method, found.num_speculative_tokens) == ("dflash", 15)
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    ordinary = {"model": str(tmp_path), "num_speculative_tokens": 2}
    assert SpeculativeConfig.from_json(json.dumps(ordinary)).method == "draft_model"
    fewer = SpeculativeConfig.from_json(
        json.dumps({"model": str(tmp_path), "num_speculative_tokens": 0})
    )
    assert fewer.num_speculative_tokens == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": "x/y", "num_speculative_tokens": 3}', "method is missing"),
        (
            '{"model": "x/EAGLE-y", "num_speculative_tokens": 3}',
            "unknown speculative method 'eagle'",
        ),
        ('{"method": "eagle3", "num_speculative_tokens": 3}', "method eagle3 needs"),
        ('{"method": "dflash", "num_speculative_tokens": 3}', "method dflash needs"),
        ('{"method": "dspark", "model": "x/y"}', "unknown speculative method 'dspark'"),
        ('{"method": "draft_model", "num_speculative_tokens": 3}', "method draft_model needs"),
        ('{"method": "draft_model", "model": "x/y"}', "num_speculative_tokens is missing"),
        (
            '{"method": "mtp", "num_speculative_tokens": 3, "eagle_aux_hidden_state_layer_ids": [1]}',
            "eagle_aux_hidden_state_layer_ids belong to the method eagle3",
        ),
    ],
)
def test_a_draft_model_that_is_nothing_here(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SpeculativeConfig.from_json(text)


def test_the_page_names_every_method_and_every_key() -> None:
    registry = Path(registry_module.__file__).read_text()
    methods = re.findall(r'^@DRAFTERS\.register\("(.+)"\)$', registry, re.MULTILINE)
    assert {"ngram", "mtp"} <= set(methods)
    page = (Path(__file__).parents[3] / "docs" / "use" / "speculation.md").read_text()
    named = set(re.findall(r"`([\w-]+)`", page))
    assert {*methods, *SpeculativeConfig.model_fields} <= named
