"""Cases of acceptance: as many drafts are accepted later, in company and far into a context."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from .case import Finding, Verdict, case, failed, inapplicable, passed, unclear
from .equality import REPEATING, greedy
from .target import Body, Subject

_COUNTED = "drafts counted in /metrics as vLLM does"
_UNCOUNTED = "no drafts are counted by vllm:spec_decode_num_draft_tokens"
_BORDERS = (1024, 2048, 4096)  # tokens
_LEAST_ACCEPTED = 0.1  # of drafts: less shows nothing
_DRAFTS = re.compile(r"^vllm:spec_decode_num_(accepted|draft)_tokens_total\{.*\} (\S+)$", re.M)


async def _counts(subject: Subject) -> Counter[str]:
    found = _DRAFTS.findall(await subject.target.get("metrics"))
    counts = Counter[str]()
    for kind, value in found:
        counts[kind] += int(float(value))
    return counts


async def _acceptance(subject: Subject, prompts: Sequence[str], *, at_once: bool) -> float | None:
    """Return the share of drafts accepted in answers, None where none are counted."""
    before = await _counts(subject)
    bodies = [greedy(prompt, 64, ignore_eos=True) for prompt in prompts]
    for part in [bodies] if at_once else [[body] for body in bodies]:
        await subject.target.together(part)
    new = await _counts(subject) - before
    return new["accepted"] / new["draft"] if new["draft"] else None


def _still_accepted(before: float, after: float | None, where: str, body: Body) -> Finding:
    """Judge the shares of drafts that were accepted first and then."""
    if before < _LEAST_ACCEPTED:
        return unclear(f"accepted {before:.0%} at first: nothing to lose")
    if after is None:
        return unclear(f"accepted {before:.0%} at first; no draft {where}")
    told = f"accepted {before:.0%} at first, {after:.0%} {where}"
    return failed(told, body) if after < before / 4 else passed(told)


@case(
    "acceptance-collapse",
    "V#52873 L#27151",
    "as many drafts accepted as before",
    seconds=25,
    needs=_COUNTED,
)
async def collapse(subject: Subject) -> Finding:
    """Count accepted drafts before and after a long sampled answer."""
    prompts = [REPEATING] * 3
    before = await _acceptance(subject, prompts, at_once=False)
    if before is None:
        return inapplicable(_UNCOUNTED)
    room = (subject.max_len or 4096) - 64
    body = greedy(REPEATING, min(1500, room), ignore_eos=True, temperature=1.0, seed=1)
    await subject.target.ask_one(body)
    after = await _acceptance(subject, prompts, at_once=False)
    return _still_accepted(before, after, "after a long answer", body)


@case(
    "acceptance-in-company",
    "L#27852 llama.cpp-tq3#79",
    "as many drafts accepted as alone",
    seconds=10,
    needs=_COUNTED,
)
async def acceptance_in_company(subject: Subject) -> Finding:
    """Count accepted drafts of four texts one by one, then of all at once."""
    words = ("red green blue", "left right up down", "spring summer autumn winter", "do re mi fa")
    prompts = [" ".join([each] * 6) for each in words]
    alone = await _acceptance(subject, prompts, at_once=False)
    if alone is None:
        return inapplicable(_UNCOUNTED)
    together = await _acceptance(subject, prompts, at_once=True)
    body = greedy(prompts[0], 64, ignore_eos=True)
    return _still_accepted(alone, together, "among three others", body)


@case(
    "acceptance-at-borders",
    "L#23636 L#23658",
    "as many drafts accepted as behind a short prompt",
    seconds=20,
    needs=_COUNTED,
)
async def acceptance_at_borders(subject: Subject) -> Finding:
    """Count accepted drafts of answers that go on over 1,024, 2,048 and 4,096 tokens."""
    before = await _acceptance(subject, [REPEATING] * 3, at_once=False)
    if before is None:
        return inapplicable(_UNCOUNTED)
    words = REPEATING.split() * 16
    sample = await subject.target.ask_one(greedy(" ".join(words), 1))
    if not (counted := sample.usage.get("prompt_tokens")):
        return inapplicable("it does not count prompt_tokens")
    finding = unclear("the context has less than 1,024 tokens")
    for border in _BORDERS:
        if border + 64 > (subject.max_len or 2048):
            break
        length = (border - 32) * len(words) // counted
        prompt = " ".join((words * border)[:length])
        after = await _acceptance(subject, [prompt] * 3, at_once=False)
        body = greedy(f"'one two three four ' * {length // 4}", 64, ignore_eos=True)
        finding = _still_accepted(before, after, f"around token {border}", body)
        if finding.verdict is not Verdict.PASS:
            break
    return finding


CASES = (collapse, acceptance_in_company, acceptance_at_borders)
