"""Which models are woken and put to sleep, and what their requests are told."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from surestep_common.errors import ModelNotLoaded
from surestep_gateway.schedulers.pool import SchedulerPool
from surestep_gateway.schedulers.residency import Order, Standing, orders

NOW = 100.0
LOAD, UNLOAD = Order.LOAD, Order.UNLOAD


def standing(
    awake: bool = True,
    *,
    moving: bool = False,
    stays: bool = False,
    wanted: float | None = None,
    idle: float | None = None,
    after: float | None = None,
) -> Standing:
    return Standing(awake, moving, stays, wanted, idle, after)


ASLEEP = standing(False)
BUSY = standing()


@pytest.mark.parametrize(
    ("models", "most", "given"),
    [
        ([BUSY, standing(False, wanted=1)], None, {1: LOAD}),
        ([BUSY, standing(False, wanted=1)], 1, {}),
        ([standing(idle=50), standing(False, wanted=1)], 1, {0: UNLOAD}),
        ([standing(idle=50, stays=True), standing(False, wanted=1)], 1, {}),
        ([standing(idle=60), standing(idle=50), standing(False, wanted=1)], 2, {1: UNLOAD}),
        ([standing(moving=True), standing(idle=9), standing(False, wanted=1)], 2, {}),
        ([ASLEEP, standing(False, wanted=5), standing(False, wanted=4)], 1, {2: LOAD}),
        ([standing(False, wanted=1, moving=True)], None, {}),
        ([standing(idle=70, after=30)], None, {0: UNLOAD}),
        ([standing(idle=71, after=30), standing(after=1)], None, {}),
        ([standing(idle=70, after=30), standing(False, wanted=1)], 1, {0: UNLOAD}),
        (
            [standing(idle=70), standing(idle=70, after=1), standing(False, wanted=1)],
            2,
            {1: UNLOAD},
        ),
    ],
)
def test_orders(models: list[Standing], most: int | None, given: dict[int, Order]) -> None:
    assert orders(models, most, NOW) == given


TIMES = st.none() | st.floats(0, NOW)


@given(
    st.lists(
        st.builds(Standing, st.booleans(), st.booleans(), st.booleans(), TIMES, TIMES, TIMES),
        max_size=6,
    ),
    st.none() | st.integers(1, 6),
)
def test_nothing_busy_ends_and_no_more_are_awake_than_may_be(
    models: list[Standing], most: int | None
) -> None:
    given_ = orders(models, most, NOW)
    loads = [models[index] for index, order in given_.items() if order is LOAD]
    awake = sum(model.awake for model in models)
    assert all(not model.awake and model.wanted_since is not None for model in loads)
    assert most is None or not loads or awake + len(loads) <= most
    for index, order in given_.items():
        model = models[index]
        assert not model.moving
        if order is UNLOAD:
            assert model.awake
            assert not model.stays
            assert model.idle_since is not None
    full = most is not None and awake >= most
    wanted = any(
        one.wanted_since is not None and not one.awake and not one.moving for one in models
    )
    assert not wanted or full or loads


async def test_a_fault_is_told_at_once_and_for_a_while() -> None:
    pool = SchedulerPool(["127.0.0.1:1"], "m", comes_and_goes=True)
    pool.fail(ModelNotLoaded("m cannot be loaded: no file"), 30)
    assert pool.residence == "failed"
    for asking in (pool.known(60), pool.acquire(b"", 60)):
        with pytest.raises(ModelNotLoaded, match="no file") as refused:
            async with asyncio.timeout(5):
                await asking
        assert refused.value.retry_after == 30
    assert not pool.num_waiting
    pool.begin_loading()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await pool.acquire(b"", 0.01)
    await pool.close()


async def test_without_room_the_wait_has_its_usual_limit() -> None:
    pool = SchedulerPool(["127.0.0.1:1"], "m", comes_and_goes=True)
    pool.loading = pool.no_room = True
    with pytest.raises(Exception, match="as many models as fit are awake, and all have requests"):
        await pool.acquire(b"", 0.01)
    await pool.close()
