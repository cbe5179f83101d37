"""Whether parameters shaped the answers that `surestep verify` was given."""

from __future__ import annotations

import pytest
from surestep_cli.verify.answers import Answer, Choice
from surestep_cli.verify.oracle import Answered, _obeyed
from surestep_cli.verify.prompts import parameters
from surestep_cli.verify.report import Verdict


@pytest.mark.parametrize(
    ("choice", "verdict"),
    [
        (Choice([1], "", called=True, finish_reason="tool_calls"), Verdict.EQUAL),
        (Choice([1], "It may.", finish_reason="stop"), Verdict.DIFFERENT),
        (Choice([1], "", finish_reason="length"), Verdict.EQUAL),  # it still reasoned
    ],
    ids=["called", "told", "cut"],
)
def test_a_tool_that_must_be_called(choice: Choice, verdict: Verdict) -> None:
    prompt = next(one for one in parameters() if one.name == "a tool")
    answer = Answer()
    answer.choices[0] = choice
    (check,) = _obeyed([Answered(prompt, answer)])
    assert check.verdict is verdict
