"""The page that lies beside a head: how it was made, and how often its drafts are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Facts(NamedTuple):
    """Facts of a training."""

    model: str
    command: str
    conversations: int
    tokens: int  # of all conversations
    answer_tokens: int  # of these, in answers, which are learnt
    held_out: int  # conversations
    layers: Sequence[int]
    draft_vocab: int
    covered: float  # share of the tokens of held-out answers that can be drafted
    parameters: int
    began: str  # the head was what before
    epochs: float
    accepted: Sequence[float]  # share of windows whose first 1, 2, .. drafts are right


def write_card(folder: Path, facts: Facts) -> None:
    """Write README.md."""
    drafts = range(1, len(facts.accepted) + 1)
    millions, covered = facts.parameters / 1e6, 100 * facts.covered
    (folder / "README.md").write_text(
        f"""---
base_model: {facts.model}
---

# EAGLE-3 head for {facts.model}

Drafts for {facts.model}, from its hidden states after {_listed(facts.layers)} layers.
{millions:.1f} million parameters in bfloat16: one layer, which began as {facts.began}. It
drafts from {facts.draft_vocab} tokens, which are {covered:.1f} % of the tokens of held-out answers.

```bash
{facts.command}
```

{facts.epochs:g} epochs on {facts.conversations} conversations of {facts.tokens} tokens,
{facts.answer_tokens} of them in answers. The model wrote them itself, both sides: questions at
temperature 0.7 or 1 with top_p 0.95, half of them after a few given words; three of four answers as
the model is served by default, the others greedily or at temperature 0.8 with top_p 0.95. A quarter
of the conversations were to have two questions. Nobody else's text was used.

Share of windows whose first drafts are all right, of one window at every token of the answers in
{facts.held_out} held-out conversations:

| {" | ".join(f"{n} draft{'s' if n > 1 else ''}" for n in drafts)} |
|{"---|" * len(facts.accepted)}
| {" | ".join(f"{100 * share:.1f} %" for share in facts.accepted)} |
""",
        encoding="utf-8",
    )


def _listed(layers: Sequence[int]) -> str:
    *most, last = map(str, layers)
    return f"{', '.join(most)} and {last}" if most else last
