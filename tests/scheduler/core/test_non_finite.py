"""Logits that are not finite: once, again, and of several requests at a time."""

from __future__ import annotations

from collections import Counter

import pytest
from support.fakes.loop import FakeLoop
from support.fakes.model import FakeModel
from surestep_common.errors import InvalidRequest, ModelFault
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb
from surestep_scheduler.core.poison import NonFiniteLogits
from surestep_scheduler.core.sequence import Sequence

MODEL = FakeModel()
PROMPT = [*range(30)]


class Faults:
    """Requests fail when they know so many tokens, as often as told."""

    def __init__(self, times: dict[str, int], known: int = 34) -> None:
        self.left = Counter(times)
        self._known = known

    def __call__(self, request_id: str, known: int) -> pb.RowStatus:
        if known < self._known or not self.left[request_id]:
            return pb.OK
        self.left[request_id] -= 1
        return pb.NON_FINITE


def tokens(seq: Sequence) -> list[int]:
    request = seq.request
    return PROMPT + MODEL.complete(request.prompt_ids, request.max_tokens, request.sampling)


def errors(loop: FakeLoop) -> dict[str, type[Exception]]:
    return {o.seq.request.id: type(o.error) for o in loop.outputs if o.error is not None}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_once_is_computed_again(depth: int) -> None:
    loop = FakeLoop(MODEL, depth=depth, status_of=Faults({"r1": 1}))
    seqs = [loop.add(PROMPT, 20) for _ in range(3)]
    loop.run()
    assert errors(loop) == {}
    assert [list(seq.tokens) for seq in seqs] == [tokens(seq) for seq in seqs]
    assert [seq.num_non_finite for seq in seqs] == [1, 0, 0]
    assert loop.state.counters.finished == {"length": 3}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_twice_fails_alone(depth: int) -> None:
    loop = FakeLoop(MODEL, depth=depth, status_of=Faults({"r2": 2}))
    seqs = [loop.add(PROMPT, 20) for _ in range(3)]
    loop.run()
    assert errors(loop) == {"r2": ModelFault}
    assert [list(seqs[i].tokens) for i in (0, 2)] == [tokens(seqs[i]) for i in (0, 2)]
    assert loop.state.counters.finished == {"length": 2, "error": 1}


@pytest.mark.parametrize("recurrent", [False, True])
def test_nobody_finds_what_it_computed_or_used(recurrent: bool) -> None:
    model = FakeModel(recurrent=recurrent, num_snapshots=9 * recurrent)
    loop = FakeLoop(model, status_of=Faults({"r2": 1}))
    loop.complete(PROMPT, 2)
    seq = loop.add(PROMPT, 20)
    loop.step()
    assert loop.plans[-1].admissions[0].num_cached == 28
    while not seq.num_non_finite:
        loop.step()
    other = loop.add([*seq.tokens[:33]], 5)
    loop.step()
    admitted = {t.seq.request.id: t.num_cached for t in loop.plans[-1].admissions}
    assert admitted == {"r2": 0, "r3": 0}
    loop.run()
    assert list(seq.tokens) == tokens(seq)
    assert len(other.tokens) == 38
    loop.add([*seq.tokens[:34]], 5)
    loop.step()
    assert loop.plans[-1].admissions[0].num_cached == 32  # what was computed again serves


def test_several_at_once_are_the_workers_fault() -> None:
    faults = Faults({"r1": 2, "r2": 1})
    loop = FakeLoop(MODEL, status_of=faults)
    seqs = [loop.add(PROMPT, 20) for _ in range(4)]
    with pytest.raises(NonFiniteLogits):
        loop.run()
    assert errors(loop) == {}
    loop.fence()
    loop.run()
    assert errors(loop) == {"r1": ModelFault}  # new workers did not help it
    assert [list(seq.tokens) for seq in seqs[1:]] == [tokens(seq) for seq in seqs[1:]]


def test_workers_are_not_replaced_for_it_again_and_again() -> None:
    faults = Faults({f"r{i}": 2 for i in range(1, 9)})
    loop = FakeLoop(MODEL, status_of=faults)
    for _ in range(4):
        loop.add(PROMPT, 20)
    with pytest.raises(NonFiniteLogits):
        loop.run()
    loop.fence()
    for _ in range(4):
        loop.add(PROMPT, 20)
    loop.run()
    assert errors(loop) == {f"r{i}": ModelFault for i in range(1, 9)}


def test_far_apart_they_are_nothing_in_common() -> None:
    loop = FakeLoop(MODEL, status_of=Faults({"r1": 1, "r22": 1}))
    for _ in range(22):
        loop.complete(PROMPT, 20)
    assert errors(loop) == {}
    assert loop.state.counters.finished == {"length": 22}


@pytest.mark.parametrize("status", [pb.NO_CANDIDATE, pb.SHAPING_OVERFLOW])
@pytest.mark.parametrize(
    ("sampling", "error"),
    [
        (sampling_pb2.SamplingParams(repetition_penalty=0.01), InvalidRequest),
        (sampling_pb2.SamplingParams(repetition_penalty=1, allowed_token_ids=[3]), InvalidRequest),
        (sampling_pb2.SamplingParams(repetition_penalty=1), ModelFault),  # it has asked for nothing
    ],
)
def test_what_parameters_make_of_logits_is_the_requests_own_doing(
    status: pb.RowStatus, sampling: sampling_pb2.SamplingParams, error: type[Exception]
) -> None:
    """However many such requests there are, the workers stay."""
    loop = FakeLoop(MODEL, status_of=lambda name, known: status if known > 33 else pb.OK)
    seqs = [loop.add(PROMPT, 20, sampling=sampling) for _ in range(5)]
    loop.run()
    assert errors(loop) == {f"r{i}": error for i in range(1, 6)}
    assert [seq.num_non_finite for seq in seqs] == [0] * 5
