"""A drafter as docs/change/extend.md has one written: a class with `propose`, and its name."""

from __future__ import annotations

from support.parity.bench import ParityBench, same, total
from surestep_worker.drafters import DRAFTERS, DraftContext, Drafts
from surestep_worker.drafters.config import SpeculativeConfig
from torch import Tensor


@DRAFTERS.register("repeat-last")
class RepeatLast:
    """Drafts the last known token, again and again."""

    def __init__(self, config: SpeculativeConfig, context: DraftContext) -> None:
        self._most = config.num_speculative_tokens

    def propose(self, tokens: Tensor, slots: Tensor, lengths: Tensor, max_drafts: Tensor) -> Drafts:
        """See Drafter."""
        last = tokens[slots, lengths - 1].long()
        return Drafts(last[:, None].repeat(1, self._most), max_drafts.clamp(max=self._most))


def test_it_drafts_and_changes_no_token(bench: ParityBench) -> None:
    answers = bench.run("mixed", drafter="repeat-last", k=4, depth=1)
    for name, expected in bench.expected.items():
        assert same(answers[name], expected), name
    assert total(answers, "num_drafts") > total(answers, "num_accepted") > 0


def test_the_flag_takes_its_name() -> None:
    config = SpeculativeConfig.from_json('{"method": "repeat-last", "num_speculative_tokens": 4}')
    assert DRAFTERS.get(config.method) is RepeatLast
