"""`surestep zoo` finds nothing wrong with a hybrid that drafts with its MTP head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from support.processes.stack import serve
from surestep_cli.zoo.command import Zoo

pytestmark = [pytest.mark.timeout(400), pytest.mark.rotates(4, turn=3)]

HYBRID = Path(__file__).parents[1] / "data" / "tiny-hybrid"
SPECULATION = '{"method": "qwen3_5_mtp", "num_speculative_tokens": 4}'
FLAGS = (
    *("--max-num-seqs", "64", "--kv-cache-memory", "0.1", "--no-adaptive-draft-length"),
    *("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"),
)


def test_nothing_is_wrong_with_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(HYBRID, tmp_path, *FLAGS, "--speculative-config", SPECULATION) as stack:
        status = Zoo.load([stack.url, "--json"]).run(Console(stderr=True))
        drafted = stack.metric("vllm:spec_decode_num_draft_tokens_total")
    told = {one["case"]: one for one in json.loads(capsys.readouterr().out)["cases"]}
    wrong = {name: one["why"] for name, one in told.items() if one["verdict"] == "fail"}
    assert (status, wrong) == (0, {})
    assert told["on-off"]["verdict"] == told["company"]["verdict"] == "pass"
    assert drafted > 0
    passed = {name for name, one in told.items() if one["verdict"] == "pass"}
    assert len(passed) > 18, {name: told[name]["why"] for name in told.keys() - passed}
