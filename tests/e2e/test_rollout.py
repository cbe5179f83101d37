"""The example that teaches a model by its own samples: drafts and dead ranks change no reward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes.stack import serve

EXAMPLE = Path(__file__).parents[2] / "examples" / "rollout.py"
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
UPDATES = 6


def run(*arguments: str | Path) -> list[dict[str, Any]]:
    """Return the lines of JSON, one for each update."""
    command = [sys.executable, EXAMPLE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.rotates(1)
def test_neither_drafts_nor_dead_ranks_change_what_is_learnt(tmp_path: Path) -> None:
    model = tmp_path / "model"
    run(model, "--make")
    flags = "--dtype", "float32", "--enable-weight-updates", "--admin-api-key", "secret"
    asked = model, "--admin-api-key", "secret", "--updates", str(UPDATES), "--url"
    drafting = "--no-adaptive-draft-length", "--speculative-config", DRAFTS
    with serve(model, tmp_path / "drafting", *flags, *drafting) as stack:
        faulty = run(*asked, stack.url, "--kill-every", "2")
        stack.headers = {"authorization": "Bearer secret"}
        lost = [one for one in stack.scheduler()["incidents"] if one["cause"] == "worker_exit"]
    with serve(model, tmp_path / "plain", *flags, "--speculative-config", "none") as stack:
        plain = run(*asked, stack.url)
    rewards = [one["reward"] for one in plain]
    assert [one["reward"] for one in faulty] == rewards
    assert rewards[-1] > 2 * rewards[0]
    assert len(lost) == len({one["killed"] for one in faulty} - {None}) == UPDATES // 2
    assert any(one["num_replayed_requests"] for one in lost)
    assert (
        sum(one["drafts_accepted"] for one in faulty)
        > sum(one["drafts_accepted"] for one in plain)
        == 0
    )
    assert max(one["difference"] for one in [*faulty, *plain]) < 1e-4
