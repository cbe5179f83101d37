"""The memory for bodies is never exceeded, never lost, and taken from the slowest."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message
from surestep_common.errors import Cancelled, RequestTooLarge, SurestepError, Unavailable
from surestep_gateway.http.bodies import SMALL_BYTES, Bodies, BodyLimits, BodyReader

PIECE = 50_000
LIMITS = BodyLimits(body_bytes=6 * PIECE, total_bytes=5 * PIECE, timeout_s=60, bytes_per_s=1 << 16)
HEADERS = {b"transfer-encoding": b"chunked", b"content-type": b"application/json"}


class Sender:
    """Sender of a single body."""

    def __init__(self, bodies: Bodies) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.body = BodyReader(bodies, self.messages.get, HEADERS)
        self.reading = asyncio.ensure_future(self._read())
        self.error: SurestepError | None = None
        self.sent = 0

    async def _read(self) -> None:
        try:
            await self.body.read()
        except SurestepError as error:
            self.error = error

    def send(self, size: int, *, more: bool) -> None:
        self.sent += size
        self.messages.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})

    @property
    def complete(self) -> bool:
        return self.reading.done() and self.error is None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["new", "piece", "last", "leave", "release"]),
        st.integers(0, 9),
        st.integers(0, 3),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_bodies(steps: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        bodies = Bodies(LIMITS)
        senders: list[Sender] = []
        for what, which, size in steps:
            one = senders[which % len(senders)] if senders else None
            if what == "new":
                senders.append(Sender(bodies))
            elif one is None:
                continue
            elif what == "release":
                one.body.release()
            elif not one.reading.done():
                if what == "leave":
                    one.messages.put_nowait({"type": "http.disconnect"})
                else:
                    one.send(size * PIECE, more=what == "piece")
            for _ in range(6):
                await asyncio.sleep(0)
            check(bodies, senders)
        for one in senders:
            one.messages.put_nowait({"type": "http.disconnect"})
            await one.reading
            one.body.release()
        assert (bodies.num_bytes, bodies.arriving) == (0, {})

    asyncio.run(run())


def check(bodies: Bodies, senders: list[Sender]) -> None:
    assert bodies.num_bytes == sum(one.body.counted for one in senders) <= LIMITS.total_bytes
    for one in senders:
        assert one.body.counted in (0, max(0, len(one.body.data) - SMALL_BYTES))
        match one.error:
            case None:
                pass
            case RequestTooLarge():
                assert one.sent > LIMITS.body_bytes
            case error:
                assert isinstance(error, Unavailable | Cancelled)
        if one.error is not None:
            assert not one.body.data
    assert set(bodies.arriving) == {one.body for one in senders if not one.reading.done()}


async def test_the_longest_arriving_goes_first() -> None:
    bodies = Bodies(LIMITS)
    first, second, third = [Sender(bodies) for _ in range(3)]

    async def settle() -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    await settle()
    second.send(3 * PIECE, more=True)
    first.send(3 * PIECE, more=True)
    await settle()
    third.send(5 * PIECE, more=False)
    await settle()
    assert isinstance(first.error, Unavailable)
    assert third.complete
    assert isinstance(second.error, Unavailable)
    newcomer = Sender(bodies)
    newcomer.send(SMALL_BYTES, more=False)  # small ones always fit
    await settle()
    assert newcomer.complete
    large: Any = Sender(bodies)
    large.send(5 * PIECE, more=False)  # and a whole one is not given up for another
    await settle()
    assert isinstance(large.error, Unavailable)
    assert third.body.data
