"""Configurations of speculation compared, on servers that the command starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from repo.source import ROOT
from surestep_cli.bench.drafters import DrafterResult, Speed, _picture

MODEL = ROOT / "tests/data/tiny-hybrid"


@pytest.mark.timeout(300)
@pytest.mark.rotates(1)
def test_a_drafter_is_measured_beside_none(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    chat = {"messages": [{"role": "user", "content": "2 + 2"}]}
    prompts.write_text("\n".join(map(json.dumps, ({"prompt": "The statement is"}, chat))))
    words = ["bench", "--drafters", "auto,none", "--json"]
    words += ["--serve", f"{MODEL} --max-num-seqs 4 --api-key secret"]
    words += ["--prompts", str(prompts), "--num-requests", "8", "--concurrency", "2"]
    command = [sys.executable, "-m", "surestep_cli", *words, "--max-tokens", "24"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    mtp, none = json.loads(done.stdout)
    assert (mtp["config"], none["config"]) == ("auto", "none")
    for result in (mtp, none):
        assert [speed["concurrency"] for speed in result["speeds"]] == [1, 2]
        assert all(speed["equal"] and speed["tok_s"] > 0 for speed in result["speeds"])
    assert 1 >= mtp["accepted"][0] > 0.3
    assert mtp["accepted"] == sorted(mtp["accepted"], reverse=True)
    assert not any(none["accepted"])


def test_what_is_faster_is_recommended() -> None:
    def result(config: str, alone: float, many: float) -> DrafterResult:
        speeds = [Speed(1, 100 * alone, 100, True), Speed(8, 400 * many, 400, True)]
        return DrafterResult(config, speeds, [0.5, 0.2])

    results = [result("ngram", 1.1, 0.9), result('{"method": "mtp"}', 1.4, 1.01)]
    *_, alone, many = _picture(results, ascii_only=True)
    assert alone == 'Best with 1 at a time: --speculative-config \'{"method": "mtp"}\' (1.40x)'
    assert "none of them is faster than no drafts (1.01x)" in many
