"""Cases of constraints: grammars, tools, banned tokens, log-probabilities behind drafts."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Sequence

from .case import Finding, case, failed, forced, inapplicable, is_json, passed, unclear
from .target import CHAT, TEXT, Body, Broken, Refused, Subject

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_SCHEMA: Body = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}}
}
_TOOL = {
    "type": "function",
    "function": {"name": "add_person", "description": "Note a person.", "parameters": _PERSON},
}
_LIKE_A_CALL = (
    'Use <tool_call>{"a": 1}</tool_call>, <tool_call>f<arg_key>a</arg_key></tool_call>, '
    '<minimax:tool_call><invoke name="f"></invoke>, [TOOL_CALLS] and <tool_ca for it.'
)
_NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
_NOTES = ("a", "b, c", "two words", "the third of them is quite a bit longer than the others")
# How models write calls of it: of Hermes and Qwen, Qwen's coders, GLM, MiniMax.
_WRITTEN = (
    '<tool_call>\n{{"name": "note", "arguments": {{"text": "{}"}}}}\n</tool_call>\n',
    "<tool_call>\n<function=note>\n<parameter=text>\n{}\n</parameter>\n</function>\n</tool_call>\n",
    "<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>\n",
    (
        '<minimax:tool_call>\n<invoke name="note">\n<parameter name="text">{}</parameter>\n'
        "</invoke>\n</minimax:tool_call>\n"
    ),
)
_MOST_BLANKS = 64  # of white space in a row
_PAUSE_S, _REFUSAL_S, _LATE = 5.0, 90.0, 5.0  # or so many times as long as before
# A string that matches all of these would need an automaton of 2 ** 24 states.
_HOSTILE = {
    "allOf": [{"type": "string", "pattern": f"^(.*[ab])?a.{{{n}}}$"} for n in range(1, 25)],
}


def _chat(content: str, tokens: int = 120, **fields: object) -> Body:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": tokens} | fields


@case(
    "json-at-once",
    "V#27969 V#46118 S#9187 S#17576",
    "each is JSON, or cut at max_tokens",
    seconds=20,
    needs="chats, schemas",
)
async def json_at_once(subject: Subject) -> Finding:
    """Stream thirty JSON objects at once."""
    bodies = [_chat(f"Describe person {n}.", **_SCHEMA) for n in range(30)]
    answers = await asyncio.gather(*map(subject.target.stream_one, bodies))
    for body, answer in zip(bodies, answers, strict=True):
        if answer.finish == "stop" and not is_json(answer.text):
            return failed(f"no JSON: {answer.text[:80]!r}", body)
        if answer.finish not in ("stop", "length"):
            return failed(f"ended with {answer.finish}", body)
        if not _like_an_object(answer.text):  # it may think aloud, or keep no schema
            return unclear(f"cut before any JSON: {answer.text[:80]!r}")
    ended = sum(answer.finish == "stop" for answer in answers)
    if not ended:
        return unclear("none of 30 ended within 120 tokens")
    return passed(f"{ended} of 30 ended by themselves, all of them JSON")


def _like_an_object(text: str) -> bool:
    return text.lstrip()[:1] in ("", "{")


@case(
    "runaway-blanks",
    "V#38696 V#21026 omlx#2990",
    "white space has an end",
    seconds=20,
    needs="chats, schemas, seeds",
)
async def runaway_blanks(subject: Subject) -> Finding:
    """Sample JSON hot, where a grammar without bounds drowns in white space."""
    for seed in range(6):
        body = _chat("Describe a person.", 300, temperature=2.0, seed=seed, **_SCHEMA)
        text = (await subject.target.ask_one(body)).text
        if not _like_an_object(text):
            return inapplicable("schemas are not kept to: see json-at-once")
        runs = (sum(1 for _ in run) for blank, run in itertools.groupby(text, str.isspace) if blank)
        if (longest := max(runs, default=0)) > _MOST_BLANKS:
            return failed(f"{longest} characters of white space in a row", body)
    return passed("six samples")


@case(
    "json-behind-reasoning",
    "V#48228 V#34650 S#24283",
    "bare JSON as content",
    seconds=20,
    needs="chats, schemas, reasoning told apart",
)
async def json_behind_reasoning(subject: Subject) -> Finding:
    """Ask a reasoning model for JSON: its grammar begins where the reasoning ends."""
    reasons = await subject.target.ask_one(_chat("What is 17 times 3?", 400))
    if not reasons.reasoning:
        return inapplicable("no reasoning is told apart from the answer")
    body = _chat("Describe a person.", 1500, **_SCHEMA)
    for answer in (await subject.target.ask_one(body), await subject.target.stream_one(body)):
        if answer.finish == "length":
            return unclear("the reasoning did not end within 1,500 tokens")
        if not is_json(answer.text):
            return failed(f"no JSON: {answer.text[:80]!r}", body)
    return passed("JSON behind the reasoning, streamed and not")


@case(
    "banned-token",
    "V#31982 V#39295",
    "the token never comes",
    seconds=5,
    needs="logit_bias, token ids",
)
async def banned_token(subject: Subject) -> Finding:
    """Ban the tokens that an answer begins with, one after the other."""
    body: Body = {"prompt": "The best colour is", "max_tokens": 24, "return_token_ids": True}
    banned: list[int] = []
    for _ in range(3):
        asked = body | {"logit_bias": {str(token): -100 for token in banned}}
        answer = await subject.target.ask_one(asked)
        if not answer.ids:
            return inapplicable("the server tells no token ids")
        if not set(banned).isdisjoint(answer.ids):
            return failed(f"a token of {banned} came", asked)
        banned.append(answer.ids[0])
    return passed("three answers without the tokens of those before")


@case(
    "tools-streamed",
    "S#35564 V#40875",
    "the same call in both ways",
    seconds=10,
    needs="chats, tools that are required",
)
async def tools_streamed(subject: Subject) -> Finding:
    """Require a tool call, streamed and not."""
    body = _chat("Note Ada, 36.", 200, tools=[_TOOL], tool_choice="required")
    whole, streamed = await subject.target.ask_one(body), await subject.target.stream_one(body)
    for answer in (whole, streamed):
        if answer.finish == "length":
            return unclear("the call did not end within 200 tokens")
        if not answer.calls:
            return failed(f"no call, but {answer.text[:80]!r}", body)
        for name, arguments in answer.calls:
            if name != "add_person" or not is_json(arguments):
                return failed(f"the call {name}({arguments[:80]})", body)
    if subject.repeats and whole.calls != streamed.calls:
        return failed(f"{streamed.calls} streamed, {whole.calls} not", body)
    return passed("one call, streamed and not")


@case(
    "calls-in-a-row",
    "V#41967 S#35564 rtp-llm#694",
    "each call with its arguments, in both ways",
    seconds=10,
    needs="chats, tools that are parsed, a forced text",
)
async def calls_in_a_row(subject: Subject) -> Finding:
    """Force four calls, each begun where the one before ends, streamed and not."""
    wanted = [("note", {"text": text}) for text in _NOTES]
    for form in _WRITTEN:
        body = await forced(subject, "".join(map(form.format, _NOTES)))
        body |= {"tools": [_NOTE]}
        whole = await subject.target.ask_one(body)
        if _read(whole.calls)[:1] != wanted[:1]:
            continue  # another format
        for answer in (whole, await subject.target.stream_one(body)):
            if _read(answer.calls) != wanted:
                return failed(f"{len(answer.calls)} calls: {str(answer.calls)[:200]}", body)
        return passed(f"{len(wanted)} calls, streamed and not")
    return inapplicable("no text that is forced is read as calls")


def _read(calls: Sequence[tuple[str, str]]) -> list[tuple[str, object]]:
    return [(name, json.loads(said) if is_json(said) else said) for name, said in calls]


@case("text-like-tools", "V#46183", "the text as it is", seconds=5, needs="chats, a forced text")
async def text_like_tools(subject: Subject) -> Finding:
    """Force a text that looks like tool calls, in a request without tools."""
    body = await forced(subject, _LIKE_A_CALL)
    for answer in (await subject.target.ask_one(body), await subject.target.stream_one(body)):
        if answer.text != _LIKE_A_CALL or answer.calls:
            return failed(f"{answer.text!r} and {len(answer.calls)} calls", body)
    return passed("the text came whole, streamed and not")


@case("hostile-grammar", "V#51660", "others go on meanwhile", seconds=20, needs="chats, schemas")
async def hostile_grammar(subject: Subject) -> Finding:
    """Send four schemas that no automaton of bearable size accepts, beside an honest stream."""
    schema = {"name": "hostile", "schema": _HOSTILE}
    hostile = _chat("Go.", 8, response_format={"type": "json_schema", "json_schema": schema})
    longest, usual = 0.0, await _waited(subject, 0)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(subject.target.status_of(CHAT, hostile)) for _ in range(4)]
        for number in range(1, 5):
            longest = max(longest, await _waited(subject, number))
        done, late = await asyncio.wait(tasks, timeout=max(_REFUSAL_S, _LATE * usual))
        for task in late:
            task.cancel()
    if longest > max(_PAUSE_S, _LATE * usual):
        return failed(f"others waited {longest:.1f} s, {usual:.1f} s before", hostile)
    if len(done) < len(tasks):
        return failed(f"no answer to {len(late)} of {len(tasks)} in time", hostile)
    statuses = sorted({task.result() for task in done})
    if any(status >= 500 and status != 503 for status in statuses):
        return failed(f"status {statuses}", hostile)
    return passed(f"status {statuses}; others waited {longest:.1f} s at most")


async def _waited(subject: Subject, number: int) -> float:
    began = time.monotonic()
    await subject.target.ask_one({"prompt": f"Count {number}:", "max_tokens": 8})
    return time.monotonic() - began


@case(
    "logprobs",
    "L#27972 V#34497 S#17349",
    "those of the tokens chosen",
    seconds=5,
    needs="log-probabilities",
)
async def logprobs(subject: Subject) -> Finding:
    """Read the log-probabilities of greedy answers."""
    body: Body = {"prompt": "one two three one two three one", "max_tokens": 40, "logprobs": 3}
    answer = await subject.target.ask_one(body)
    if not answer.logprobs:
        return inapplicable("no log-probabilities are told")
    if answer.num_tokens not in (None, len(answer.logprobs)):
        return failed(f"{len(answer.logprobs)} for {answer.num_tokens} tokens", body)
    if all(one.logprob == 0 for one in answer.logprobs):
        return failed("all of them are 0.0", body)
    for at, one in enumerate(answer.logprobs):
        if one.best and one.logprob < max(one.best.values()) - 1e-3:
            return failed(f"token {at + 1} is not the likeliest", body)
        if sum(map(math.exp, one.best.values())) > 1.01:
            return failed(f"probabilities at token {at + 1} add up to more than 1", body)
    return passed(f"{len(answer.logprobs)} tokens, each the likeliest")


@case(
    "prompt-logprobs",
    "V#18908 S#10660",
    "the same behind a cached prefix",
    seconds=5,
    needs="log-probabilities of prompts",
)
async def prompt_logprobs(subject: Subject) -> Finding:
    """Ask twice for the log-probabilities of a long prompt, which is cached the second time."""
    text = " ".join(f"Sentence {n} of a text." for n in range(40))
    for way in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
        body: Body = {"prompt": text, "max_tokens": 1} | way
        try:
            one, two = [await subject.target.post(TEXT, body) for _ in range(2)]
        except (Refused, Broken):
            continue
        told = [_of_prompt(answer["choices"][0]) for answer in (one, two)]
        if not told[0]:
            continue
        if len(told[0]) != len(told[1]):
            return failed(f"{len(told[0])} at first, {len(told[1])} then", body)
        worst = max(abs(a - b) for a, b in zip(*told, strict=True))
        if worst > 0.5:
            return failed(f"they differ by {worst:.2f} nats", body)
        return passed(f"{len(told[0])} tokens, {worst:.4f} nats apart at most")
    return inapplicable("no log-probabilities of prompts are told")


def _of_prompt(choice: Body) -> list[float]:
    if rows := choice.get("prompt_logprobs"):
        return [max(one["logprob"] for one in row.values()) for row in rows if row]
    told = (choice.get("logprobs") or {}).get("token_logprobs") or []
    return [value for value in told[:-1] if value is not None]


CASES = (
    json_at_once,
    runaway_blanks,
    json_behind_reasoning,
    banned_token,
    tools_streamed,
    calls_in_a_row,
    text_like_tools,
    hostile_grammar,
    logprobs,
    prompt_logprobs,
)
