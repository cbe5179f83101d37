"""Cases of equality: speculation, company and what was asked before change no answer."""

from __future__ import annotations

from .case import Finding, case, compared, failed, inapplicable, passed, unclear
from .target import Answer, Body, Subject

_SECOND = "a second server without speculation"
_NO_PLAIN = "no server of the same model without speculation: --without URL"
_TOPICS = ("the sea", "a clock", "bread", "the moon", "a bridge", "rain", "chess", "a garden")
_PROMPTS = tuple(f"Write a short text about {topic}." for topic in _TOPICS)
REPEATING = "one two three four one two three four one two three four one two"


def greedy(prompt: str, tokens: int = 48, **fields: object) -> Body:
    """Return a request for a text."""
    return {"prompt": prompt, "max_tokens": tokens, "return_token_ids": True} | fields


async def _compared(subject: Subject, bodies: list[Body]) -> Finding:
    if subject.plain is None:
        return inapplicable(_NO_PLAIN)
    pairs = [
        (body, await subject.target.ask_one(body), await subject.ask_plain(body)) for body in bodies
    ]
    return await compared(subject, pairs, "with drafts and without differ")


@case("on-off", "V#54506 V#41758", "equal tokens", seconds=15, needs=_SECOND)
async def on_off(subject: Subject) -> Finding:
    """Ask greedily with drafts and without."""
    return await _compared(subject, [*map(greedy, _PROMPTS), greedy(REPEATING)])


@case(
    "on-off-parameters",
    "V#38202 V#31982 S#33643 S#28180",
    "equal tokens",
    seconds=10,
    needs=f"{_SECOND}, penalties, min_p, logit_bias, seeds",
)
async def parameters(subject: Subject) -> Finding:
    """Ask with penalties, min_p and biases, with drafts and without."""
    ways: list[Body] = [
        {"presence_penalty": 0.8, "frequency_penalty": 0.4},
        {"repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 7, "min_p": 0.1},
        {"logit_bias": {"11": -100, "13": 5}},
        {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9},
    ]
    return await _compared(subject, [greedy(REPEATING, **way) for way in ways])


@case("on-off-long", "V#40756 V#50021", "equal tokens", seconds=25, needs=_SECOND)
async def long_answer(subject: Subject) -> Finding:
    """Ask for an answer of --long-tokens with drafts and without."""
    room = (subject.max_len or 2048) - 64
    return await _compared(subject, [greedy(REPEATING, min(subject.long, room), ignore_eos=True)])


@case("company", "S#36537 V#40875 V#49620", "equal answers", seconds=25)
async def company(subject: Subject) -> Finding:
    """Ask sixteen prompts one by one, then all at once."""
    bodies = [greedy(f"{prompt} Version {n}.", 64) for prompt in _PROMPTS for n in range(2)]
    alone = [await subject.target.ask_one(body) for body in bodies]
    together = await subject.target.together(bodies)
    pairs = list(zip(bodies, alone, together, strict=True))
    return await compared(subject, pairs, "alone and among others differ")


@case("poisoned-prefix", "V#53912 V#43559", "equal answers", seconds=10)
async def poisoned_prefix(subject: Subject) -> Finding:
    """Ask again after a prompt that begins alike."""
    shared = " ".join(f"Line {n} of a long text that both share." for n in range(24))
    first, second = greedy(f"{shared} Now sing."), greedy(f"{shared} Now count.")
    pairs: list[tuple[Body, Answer, Answer]] = []
    before = await subject.target.ask_one(first)
    for _ in range(3):
        await subject.target.ask_one(second)
        pairs.append((first, before, await subject.target.ask_one(first)))
    return await compared(subject, pairs, "before and after another prompt differ")


@case("seeds", "V#45100", "four different answers, twice", seconds=5, needs="n, seeds")
async def seeds(subject: Subject) -> Finding:
    """Ask for four samples of a seed, twice."""
    body = greedy(_PROMPTS[0], temperature=1.0, seed=11, n=4)
    one, two = [await subject.target.ask(body) for _ in range(2)]
    if len(one) != 4:
        return failed(f"{len(one)} choices, asked for 4", body)
    if len({str(answer.key) for answer in one}) == 1:
        return failed("four samples at temperature 1 are one text", body)
    if [answer.key for answer in one] != [answer.key for answer in two]:
        return unclear("the server does not repeat samples of a seed")
    return passed("four samples of a seed came twice")


CASES = (on_off, parameters, long_answer, company, poisoned_prefix, seeds)
