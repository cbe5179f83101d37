"""`surestep verify` starts real servers, hurts them, and tells right ones from wrong ones."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.conftest import FLAGS
from support.faults.server import INJECT, PACED
from support.processes.stack import environment

pytestmark = pytest.mark.timeout(300)

PROMPTS = "the dog and the dog and the dog\nabcabcabc\n"
PACE = PACED | {"FAULT_PACE_S": "0.02"}
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
DRAFTS = ("--speculative-config", SPECULATION, "--no-adaptive-draft-length")
# The verifier lets a rejected draft pass: the bug that speculative decoding must not have.
WRONG_WORKER = """
import importlib.abc, importlib.machinery, sys

class Patch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "surestep_worker.step.forward":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            choose = module.SamplingPass._choose

            def wrong(self, columns, outputs, *rest):
                chosen, drafts = choose(self, columns, outputs, *rest), outputs.drafts
                drafted = drafts.counts > 0
                first = outputs.rows.cu_windows[outputs.rows.window[drafted].long()]
                chosen.ids[first.long()] = drafts.ids[drafted, 0]
                return chosen

            module.SamplingPass._choose = wrong

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Patch())
"""


@contextlib.contextmanager
def started(
    model: Path, folder: Path, *words: str, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """The command in a session of its own, ended with the context."""
    prompts = folder / "prompts.txt"
    prompts.write_text(PROMPTS)
    command = [sys.executable, "-m", "surestep_cli", "verify", str(model), *FLAGS]
    command += ["--prompts", str(prompts), "--max-tokens", "40"]
    process = subprocess.Popen(
        [*command, "--log-dir", str(folder / "logs"), *words],
        env=environment(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()  # and with it all that it has started


def verify(*arguments: Any, **options: Any) -> tuple[int, str, str]:
    """Status, stdout and stderr; nothing is left behind."""
    with started(*arguments, **options) as process:
        out, err = process.communicate()
    return process.returncode, out, err


def served_from(folder: Path) -> list[psutil.Process]:
    """Processes that log into a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.rotates(4)
def test_a_server_that_is_right(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    words = ["--speculative-config", "auto", "--no-adaptive-draft-length", "--temperature", "0.8"]
    words += ["--json", "--report", str(path), "--quick", "--reference", "transformers"]
    status, out, _ = verify(tiny_model, tmp_path, *words, variables=PACE)
    report = json.loads(out)
    assert (status, report["verdict"]) == (0, "equal"), report["claims"]
    assert all(case["num_equal"] == case["num_answers"] for case in report["cases"])
    verdicts = {claim["name"]: claim["verdict"] for claim in report["claims"]}
    assert verdicts.pop("no published failure is met") is None  # not asked with --quick
    assert set(verdicts.values()) == {"equal"}
    assert report["speculative_config"]["method"] == "ngram"  # as the server chose
    assert report["drafts"]["windows"] > 100
    assert (report["preemptions"] > 0, report["ledger"]["rows"] > 100) == (True, True)
    assert any("reference transformers" in check["name"] for check in report["checks"])
    killed, stopped, scheduler, supervisor = report["faults"]
    assert scheduler["problem"] is supervisor["problem"] is None
    assert min(fault["num_went_on"] for fault in report["faults"]) > 0
    assert (killed["incidents"][0]["cause"], killed["problem"]) == ("worker_exit", None)
    assert (stopped["incidents"][0]["cause"], stopped["problem"]) == ("worker_hang", None)
    assert min(killed["num_open"], stopped["num_open"]) > 1
    assert stopped["incidents"][0]["detect_s"] >= 0.5  # the least deadline at rest
    pauses = {case["company"]: case["longest_pause_s"] for case in report["cases"]}
    assert max(pauses.values()) > pauses["together"]  # of one fault: a client that lags sees none
    assert "EQUAL: all " in path.read_text()
    assert served_from(tmp_path) == []


@pytest.mark.rotates(4)
def test_steps_that_stay_on_their_device(tiny_model: Path, tmp_path: Path) -> None:
    """Verify a server like one on a GPU: pipelined, its drafts unseen, grammars following them."""
    words = [*DRAFTS, "--json", "--temperature", "0.8", "--quick"]
    variables = {"PYTHONPATH": str(INJECT), "FAULT_DEVICE_S": "0.02"}
    status, out, _ = verify(tiny_model, tmp_path, *words, variables=variables)
    report = json.loads(out)
    assert (status, report["verdict"]) == (0, "equal"), report["claims"]
    assert report["drafts"]["windows"] > 100


@pytest.mark.rotates(4)
def test_a_worker_whose_verifier_is_wrong(tiny_model: Path, tmp_path: Path) -> None:
    """Sampled at a temperature, because a draft that repeats the text is rejected there."""
    (tmp_path / "sitecustomize.py").write_text(WRONG_WORKER)
    words = (*DRAFTS, "--json", "--faults", "none", "--temperature", "0.9", "--quick")
    variables = {"PYTHONPATH": str(tmp_path)}
    status, out, err = verify(tiny_model, tmp_path, *words, variables=variables)
    assert status == 1, err
    report = json.loads(out)
    assert report["verdict"] == "different"
    assert report["faults"] == []
    cases = report["cases"]
    bad = {case["speculation"] for case in cases if case["num_equal"] < case["num_answers"]}
    assert bad == {True}
    first = next(each for case in report["cases"] for each in case["differences"])
    assert first["gap"] is not None
    assert first["meaning"]


@pytest.mark.rotates(4)
def test_a_worker_that_stands_still_for_longer_than_clients_wait(
    tiny_model: Path, tmp_path: Path
) -> None:
    words = [*DRAFTS, "--quick", "--faults", "stopped", "--inter-token-timeout-s", "1"]
    words += ["--step-deadline-floor-s", "30"]  # of which a rank at rest has a sixth
    status, out, err = verify(tiny_model, tmp_path, *words, variables=PACE)
    assert status == 1, err
    assert "were lost" in out
    assert "error in the stream" in out


@pytest.mark.rotates(4)
def test_answers_too_short_to_be_disturbed(tiny_model: Path, tmp_path: Path) -> None:
    short = tmp_path / "p.jsonl"
    short.write_text('{"prompt": "the dog", "max_tokens": 1}\n')
    words = ["--prompts", str(short), "--faults", "killed", "--quick"]
    status, out, err = verify(tiny_model, tmp_path, *words, "--speculative-config", "none")
    assert status == 2, err
    assert "no stream was in the middle" in out
    assert "NOT SHOWN a lost process costs no request" in out
    assert "Speculation was turned off: n-gram drafts" in out


@pytest.mark.rotates(4)
def test_a_drafter_that_never_drafts(tiny_model: Path, tmp_path: Path) -> None:
    """Everything is equal, and nothing is shown."""
    never = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 60}
    config = json.dumps(never | {"prompt_lookup_max": 60})
    words = ["--speculative-config", config, "--faults", "none", "--quick", "--json"]
    words.append("--no-enable-prefix-caching")  # with which no answer is drafted from another
    status, out, err = verify(tiny_model, tmp_path, *words)
    assert status == 2, err
    report = json.loads(out)
    assert report["verdict"] == "not shown"
    assert all(case["num_equal"] == case["num_answers"] for case in report["cases"])
    assert "0 draft windows were verified, 100 are needed" in report["claims"][0]["evidence"]


def test_a_server_that_cannot_start(tmp_path: Path) -> None:
    status, out, err = verify(tmp_path / "nowhere", tmp_path)
    assert (status, out) == (2, "")
    assert "no such folder" in err
    assert "the server did not start; the reason stands above" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.rotates(4)
def test_no_server_outlives_the_command(
    number: signal.Signals, tiny_model: Path, tmp_path: Path
) -> None:
    with started(tiny_model, tmp_path, "--max-tokens", "400", variables=PACE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("greedy, the reference"):
                break
        assert served_from(tmp_path)
        os.kill(process.pid, number)
        process.communicate()
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    deadline = time.monotonic() + 30
    while left := served_from(tmp_path):  # of a command that was killed the kernel ends them
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
