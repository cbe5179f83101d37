"""What a request leaves open is settled where it begins, and does not change where it goes on."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from surestep_common.request_params import SHAPING
from surestep_proto.sampling_pb2 import SamplingDefaults, SamplingParams
from surestep_proto.scheduler_pb2 import GenerateRequest
from surestep_proto.worker_pb2 import WorkerInfo
from surestep_scheduler.service.requests import resolve

UNIT = st.floats(0.125, 1, width=32)
SHAPES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.just(0.0) | UNIT,
    "top_k": st.integers(0, 50),
    "top_p": UNIT,
    "min_p": st.just(0.0) | UNIT,
    "repetition_penalty": UNIT,
    "presence_penalty": st.just(0.0) | UNIT,
    "frequency_penalty": st.just(0.0) | UNIT,
}
DEFAULTS = st.builds(
    SamplingDefaults,
    **SHAPES,
    max_tokens=st.just(0) | st.integers(1, 90),
    max_tokens_limit=st.just(0) | st.integers(1, 90),
)
MODELS = st.builds(
    WorkerInfo,
    defaults=DEFAULTS,
    eos_token_ids=st.just([5, 6]),  # a model with others has another fingerprint
)
OPEN = {name: st.none() | values for name, values in SHAPES.items()}
REQUESTS = st.builds(
    GenerateRequest,
    prompt_ids=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    max_tokens=st.none() | st.integers(1, 200),
    ignore_eos=st.booleans(),
    sampling=st.builds(
        SamplingParams,
        **OPEN,
        seed=st.none() | st.integers(0, (1 << 64) - 1),
        stop_token_ids=st.lists(st.integers(0, 9), max_size=3, unique=True),
    ),
)
ROOM = st.integers(30, 150)


def copy(message: GenerateRequest) -> GenerateRequest:
    with_own_epochs = GenerateRequest()
    with_own_epochs.CopyFrom(message)
    return with_own_epochs


@given(REQUESTS, MODELS, ROOM)
def test_what_is_said_holds_and_what_is_not_is_the_models(
    said: GenerateRequest, model: WorkerInfo, room: int
) -> None:
    message = copy(said)
    resolved = resolve(message, model, room)
    for name in SHAPING:
        source = said.sampling if said.sampling.HasField(name) else model.defaults
        assert getattr(message.sampling, name) == getattr(source, name) == getattr(resolved, name)
        assert message.sampling.HasField(name)
    if said.sampling.HasField("seed"):
        assert message.sampling.seed == said.sampling.seed
    stops = set(message.sampling.stop_token_ids)
    assert stops == {*said.sampling.stop_token_ids, *(() if said.ignore_eos else (5, 6))}
    assert len(message.sampling.stop_token_ids) == len(stops)
    bounds = [room - len(said.prompt_ids), model.defaults.max_tokens_limit]
    bounds.append(said.max_tokens or model.defaults.max_tokens)
    assert message.max_tokens == resolved.max_tokens == min(filter(None, bounds))


@given(REQUESTS, MODELS, MODELS, ROOM, ROOM)
def test_what_goes_on_elsewhere_goes_on_as_it_began(
    said: GenerateRequest, here: WorkerInfo, there: WorkerInfo, room: int, more: int
) -> None:
    first, second = copy(said), copy(said)
    resolved = resolve(first, here, room)
    second.emitted_ids.append(1)
    second.resolved.CopyFrom(resolved)
    again = resolve(second, there, room + more)
    assert again == resolved
    assert second.sampling == first.sampling
    assert second.max_tokens == first.max_tokens


@given(MODELS, ROOM)
def test_seeds_that_nobody_gives_are_drawn(model: WorkerInfo, room: int) -> None:
    seeds = {resolve(GenerateRequest(prompt_ids=[1]), model, room).seed for _ in range(4)}
    assert len(seeds) == 4
