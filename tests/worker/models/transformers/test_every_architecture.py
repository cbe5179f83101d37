"""Whatever causal architecture transformers has: served as docs/models.md says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from repo.source import ROOT
from transformers import __version__ as release

_PAGE = (ROOT / "docs/models.md").read_text()
_NAMES = [*dict.fromkeys(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", _PAGE))]
_EACH = 8  # in a process, which takes seconds to import them
_GROUPS = [_NAMES[i : i + _EACH] for i in range(0, len(_NAMES), _EACH)]


def test_the_page_names_most_of_what_people_have() -> None:
    """At least 105 are served."""
    served = _PAGE.split("## Not served")[0]
    assert len({*re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", served)}) >= 105


@pytest.mark.skipif(
    f"transformers {release}," not in _PAGE, reason="the page is of another release"
)
@pytest.mark.timeout(400)
@pytest.mark.rotates(10)
@pytest.mark.parametrize("group", range(len(_GROUPS)))
def test_architectures_are_served_as_the_page_says(group: int) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/models"), *_GROUPS[group]],
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
