"""The README.md of a trained checkpoint."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
import transformers

from .evaluate import Acceptance, Evaluation

_PAGE = """# tiny-hybrid

A Qwen3.5-shaped hybrid with its MTP head, small enough for tests and trained, so that acceptance is
real and greedy text is text. {parameters:,} parameters, of which {head_parameters:,} are the
head's; bfloat16, {megabytes:.1f} MB. Written by `research/train_tiny_hybrid.py`, this page
included.

## Command

```
PYTHONPATH=tests {command}
```

{minutes:.0f} minutes of a busy machine's CPU with {threads} thread, Python {python}, torch {torch},
transformers {transformers}. The seed is fixed; other versions give other weights.

## Text

Three windows in eight are the text behind Python's `help()` topics (`pydoc_data.topics` of the
standard library: (c) Python Software Foundation, PSF licence), every tenth paragraph held out. The
others are dialogues of fixed patterns from `tools/tiny_hybrid/dialogues.py`, some with `<think>`
and `<tool_call>` blocks, of which the answers count.

## Losses, in nats per token

| | |
|---|---|
| trunk, last training steps (text and answers) | {trunk_loss:.3f} |
| trunk, held-out text | {held_out:.3f} |
| head against the trunk's own distribution, mean of four draft steps | {head_loss:.3f} |

## Acceptance

Greedy drafts of `tests/support/references/mtp.py` against the greedy target. Position s counts
windows in which drafts 1 to s are all accepted; tokens per step are for draft length K.

{acceptance}

Text: {text_windows:,} windows on continuations of held-out text. Dialogues: {dialogue_windows:,}
windows on answers.

## Prompts that work

`prompts.json` holds {right} prompts (of {asked} asked) that greedy decoding in float32 answers word
for word: `messages`, `tools` and `enable_thinking` as a client sends them, `reasoning` and `answer`
as the model gives them. The chat template ends a prompt with `<think>`, as Qwen3.5's does; with
`enable_thinking: false` the block comes closed.

{prompts}
"""


def write_report(
    folder: Path,
    command: str,
    seconds: float,
    losses: tuple[float, float],
    evaluation: Evaluation,
) -> None:
    """Write README.md; `losses` are the last ones of trunk and head."""
    page = _PAGE.format(
        parameters=evaluation.parameters + evaluation.head_parameters,
        head_parameters=evaluation.head_parameters,
        megabytes=sum(path.stat().st_size for path in folder.iterdir()) / 1e6,
        command=command,
        minutes=seconds / 60,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        trunk_loss=losses[0],
        head_loss=losses[1],
        held_out=evaluation.held_out_loss,
        acceptance=_acceptance(evaluation.on_text, evaluation.on_dialogues),
        text_windows=evaluation.on_text.windows,
        dialogue_windows=evaluation.on_dialogues.windows,
        right=sum(evaluation.right.values()),
        asked=sum(evaluation.asked.values()),
        prompts=_prompts(evaluation),
    )
    (folder / "README.md").write_text(page, encoding="utf-8")
    print(page)


def _acceptance(text: Acceptance, dialogues: Acceptance) -> str:
    rows = zip(
        text.per_position,
        dialogues.per_position,
        text.tokens_per_step,
        dialogues.tokens_per_step,
        strict=True,
    )
    lines = [
        "| s or K | text: accepted | dialogues: accepted | text: tokens/step | dialogues |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {index} | {on_text:.1%} | {spoken:.1%} | {text_tokens:.2f} | {spoken_tokens:.2f} |"
        for index, (on_text, spoken, text_tokens, spoken_tokens) in enumerate(rows, start=1)
    ]
    return "\n".join(lines)


def _prompts(evaluation: Evaluation) -> str:
    lines = ["| pattern | asked | right |", "|---|---|---|"]
    lines += [
        f"| {pattern} | {asked} | {evaluation.right.get(pattern, 0)} |"
        for pattern, asked in evaluation.asked.items()
    ]
    return "\n".join(lines)
