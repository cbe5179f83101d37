"""Work gets its places in turn, whoever gives up waiting, and none is lost."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from surestep_gateway.text.work_gate import WorkGate

LARGE = 100
Work = tuple[int, str]  # its size, and who wants it done
CALLERS = st.sampled_from(["", "a", "b"])
SIZES = st.sampled_from([0, 1, LARGE, LARGE + 1, 10**9])


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@settings(max_examples=200, deadline=None)
@given(
    places=st.integers(1, 4),
    steps=st.lists(
        st.tuples(
            *(st.sampled_from(["come", "leave", "give up"]), SIZES, CALLERS, st.integers(0, 99))
        )
    ),
)
def test_places(places: int, steps: list[tuple[str, int, str, int]]) -> None:
    async def run() -> None:
        gate = WorkGate(places, large=LARGE)
        waiting: list[tuple[Work, asyncio.Task[None]]] = []
        inside: list[Work] = []

        def may_enter(work: Work) -> bool:
            held = [caller for _, caller in inside]
            free = not work[1] or held.count(work[1]) < max(1, places - 1)
            return free and (work[0] <= LARGE or large() < max(1, places // 2))

        def large() -> int:
            return sum(size > LARGE for size, _ in inside)

        async def settle() -> None:
            await turns()
            for one in list(waiting):
                if one[1].done():
                    waiting.remove(one)
                    inside.append(one[0])
            assert len(inside) <= places
            assert large() <= max(1, places // 2)
            for caller in "ab":
                assert [name for _, name in inside].count(caller) <= max(1, places - 1)
            assert gate.num_waiting == len(waiting)
            if len(inside) < places:  # whoever waits then has had enough, or is large
                assert not any(may_enter(work) for work, _ in waiting)

        for what, size, caller, which in steps:
            if what == "come":
                entering = asyncio.ensure_future(gate.enter(size, caller))
                waiting.append(((size, caller), entering))
            elif what == "leave" and inside:
                gate.leave(*inside.pop(which % len(inside)))
            elif what == "give up" and waiting:
                _, task = waiting.pop(which % len(waiting))
                task.cancel()
                await asyncio.wait([task])
            await settle()
        for _, task in waiting:
            task.cancel()
        await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)
        for work in inside:
            gate.leave(*work)
        await asyncio.wait_for(gate.enter(10**9), 1)

    asyncio.run(run())


async def order_of(sizes: list[int]) -> list[int]:
    """The order in which work gets the one place there is."""
    gate = WorkGate(1, large=LARGE)
    await gate.enter(0)
    served: list[int] = []

    async def work(number: int, size: int) -> None:
        async with gate.place(size):
            served.append(number)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for number, size in enumerate(sizes):
            group.create_task(work(number, size))
        await turns()
        gate.leave(0)
    return served


async def test_small_work_goes_first() -> None:
    assert await order_of([10**8, 10**7, 1000, 10**6]) == [2, 3, 1, 0]


async def test_equal_work_goes_as_it_came() -> None:
    assert await order_of([5] * 6) == list(range(6))


async def test_who_holds_fewer_places_goes_first() -> None:
    """However many of another caller's wait before, and whatever they end."""
    gate = WorkGate(3, large=LARGE)
    served: list[str] = []

    async def work(caller: str) -> None:
        async with gate.place(1, caller):
            served.append(caller)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            await gate.enter(0)
        for caller in ["greedy"] * 20 + ["modest"]:
            group.create_task(work(caller))
        await turns()
        for _ in range(3):
            gate.leave(0)
    assert served.index("modest") < 2


async def test_a_caller_leaves_a_place_to_others() -> None:
    gate = WorkGate(3, large=LARGE)
    greedy = [asyncio.ensure_future(gate.enter(1, "greedy")) for _ in range(9)]
    await turns()
    assert sum(task.done() for task in greedy) == 2
    await asyncio.wait_for(gate.enter(1, "modest"), 1)
    gate.leave(1, "greedy")
    await turns()
    assert sum(task.done() for task in greedy) == 3
    for task in greedy:
        task.cancel()


async def test_giving_up_at_the_last_moment_gives_the_place_back() -> None:
    gate = WorkGate(1, large=LARGE)
    await gate.enter(1)
    waiting = asyncio.ensure_future(gate.enter(1))
    await turns()
    gate.leave(1)  # it is let in, and has not noticed
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    await asyncio.wait_for(gate.enter(1), 1)


async def test_giving_up_just_before_a_place_is_free_harms_nobody() -> None:
    gate = WorkGate(1, large=LARGE)
    await gate.enter(1)
    first, second = (asyncio.ensure_future(gate.enter(1)) for _ in range(2))
    await turns()
    first.cancel()  # which it has not noticed
    gate.leave(1)
    await asyncio.wait_for(second, 1)
    assert first.cancelled()
    assert gate.num_waiting == 0
