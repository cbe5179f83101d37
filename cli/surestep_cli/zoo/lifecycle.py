"""Cases of a server's life: clients that leave, chats that grow, processes that stand still."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from .case import Finding, case, failed, inapplicable, passed
from .target import TEXT, Answer, Body, Broken, Refused, Subject

_LATE, _LATE_S = 5.0, 5.0  # times as long as before, and seconds: a server that is still busy
_HANG_S = 20.0
_POLL_S = 0.5


@case("cancel-storm", "smg#2113", "an answer as before, as soon as before", seconds=15)
async def cancel_storm(subject: Subject) -> Finding:
    """Open 48 streams, drop each behind its first token, then ask once more."""
    body: Body = {"prompt": "Say something.", "max_tokens": 24}
    before, took_before_s = await _timed(subject, body)
    long: Body = {"prompt": "Go on and on.", "max_tokens": 1000, "ignore_eos": True}
    room = (subject.max_len or 2048) // 2

    async def drop(number: int) -> None:
        asked = long | {"prompt": f"{number}: go on.", "max_tokens": min(1000, room)}
        async with subject.target.begun(TEXT, asked):
            pass

    await asyncio.gather(*map(drop, range(48)), return_exceptions=True)
    after, took_s = await _timed(subject, body)
    if took_s > max(_LATE_S, _LATE * took_before_s):
        return failed(f"the next answer took {took_s:.1f} s, {took_before_s:.1f} s before", long)
    if subject.repeats and before.key != after.key:
        return failed(f"{after.text[-40:]!r} for {before.text[-40:]!r}", body)
    return passed(f"the next answer took {took_s:.1f} s, {took_before_s:.1f} s before")


async def _timed(subject: Subject, body: Body) -> tuple[Answer, float]:
    began = time.monotonic()
    answer = await subject.target.ask_one(body)
    return answer, time.monotonic() - began


@case(
    "growing-chat",
    "V#45238 wtdcode#73 syv#52",
    "every turn finds the one before",
    seconds=25,
    needs="chats, cached_tokens in the usage",
)
async def growing_chat(subject: Subject) -> Finding:
    """Hold a chat of ten turns, and read how much of each prompt was cached."""
    messages: list[Body] = []
    for turn in range(10):
        content = f"Turn {turn}: " + "say a little more about rivers and the sea. " * 6
        messages.append({"role": "user", "content": content})
        body: Body = {"messages": messages, "max_tokens": 24}
        answer = await subject.target.ask_one(body)
        messages = [*messages, {"role": "assistant", "content": answer.text}]
        details = answer.usage.get("prompt_tokens_details") or {}
        if "cached_tokens" not in details:
            return inapplicable("the usage tells no cached_tokens")
        if turn >= 2 and not details["cached_tokens"]:
            asked = answer.usage.get("prompt_tokens")
            return failed(f"0 of {asked} tokens cached in turn {turn + 1}", body)
    return passed("each turn from the third found cached tokens")


@case(
    "hang-seen",
    "Fastllm-proxy#19 V#39863 V#36960 V#40926",
    "a probe fails, or it recovers",
    seconds=30,
    needs="--stop-pid",
)
async def hang_seen(subject: Subject) -> Finding:
    """Stop a process of the server, and see whether anybody notices. Needs --stop-pid."""
    if subject.process is None:
        return inapplicable("--stop-pid names the process that computes")
    try:
        os.kill(subject.process, signal.SIGSTOP)
    except OSError as error:
        raise Refused(f"process {subject.process} cannot be stopped: {error.strerror}") from error
    try:
        async with asyncio.timeout(_HANG_S), asyncio.TaskGroup() as group:
            asking = group.create_task(_answered(subject))
            told = await _first_sign(subject, asking)
            asking.cancel()
    except TimeoutError:
        return failed(f"no probe noticed within {_HANG_S:.0f} s, and no request was answered")
    finally:
        os.kill(subject.process, signal.SIGCONT)
    return passed(told)


async def _answered(subject: Subject) -> bool:
    try:
        await subject.target.ask_one({"prompt": "Are you there?", "max_tokens": 8})
    except (Refused, Broken):
        return False
    return True


async def _first_sign(subject: Subject, asking: asyncio.Task[bool]) -> str:
    """Return what noticed the hang first, when one does."""
    began = time.monotonic()
    while not (asking.done() and asking.result()):
        for path in ("health/ready", "health"):
            if await _says_no(subject, path):
                return f"/{path} said so after {time.monotonic() - began:.1f} s"
        await asyncio.sleep(_POLL_S)
    return f"a request was answered after {time.monotonic() - began:.1f} s"


async def _says_no(subject: Subject, path: str) -> bool:
    try:
        await subject.target.get(path)
    except Refused as error:
        return "404" not in str(error)
    except Broken:
        return True
    return False


CASES = (cancel_storm, growing_chat, hang_seen)
