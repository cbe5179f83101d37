from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from surestep_common import process

RAISE = """
import resource, sys
from surestep_common.process import raise_file_limit
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
told = raise_file_limit()
assert told == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raise_file_limit(), told
sys.stdout.write(str(told))
"""


@pytest.mark.parametrize(("soft", "hard", "raised"), [(256, 512, 512), (512, 512, 512)])
def test_the_limit_on_files_is_raised(soft: int, hard: int, raised: int) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = (sys.executable, "-c", RAISE, str(soft), str(hard))
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert int(done.stdout) == raised


def test_memory_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = process.memory_bytes()
    assert whole > 1 << 20
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(process, "_MEMORY_LIMITS", (str(limit),))
    machine = process.memory_bytes()
    for text, expected in (
        ("max\n", machine),
        ("1048576\n", 1 << 20),
        (f"{machine * 2}\n", machine),
    ):
        limit.write_text(text)
        assert process.memory_bytes() == expected


def test_states_of_a_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert process.state_of(child.pid) == process.STOPPED
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not waited for
        assert process.state_of(child.pid) == process.ENDING
    finally:
        child.kill()
        child.communicate()
    assert process.state_of(child.pid) == process.DEAD
    assert process.state_of(os.getpid()) == "R"
