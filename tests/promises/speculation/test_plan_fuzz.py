"""Plans and results that are not as they should be: each is refused, or changes no token."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from support.clients.vector_requests import for_vectors
from support.parity.bench import NEIGHBOURS, ParityBench, build_runner, load
from support.parity.local_engine import LocalEngine, one_rank
from surestep_common.errors import SurestepError
from surestep_proto import worker_pb2 as pb
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.startup.built import Built

pytestmark = pytest.mark.timeout(300)

SEED = 4
EPOCHS = 50
STEPS = 15
NUMBERS = (0, 1, 2, 3, 5, 8, 13, 31, 40, 44, 100, 159, 160, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
DRAFTERS = {"bench": "ngram", "hybrid_bench": "mtp"}


class Mutator:
    """Changes plans a little: a number, an element, a column, a message."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def mutate(self, plan: pb.StepPlan) -> None:
        """One to three changes."""
        for _ in range(self.rng.randint(1, 3)):
            self._change(plan)

    def _change(self, message: Message) -> None:
        field: Any = self.rng.choice(list(message.DESCRIPTOR.fields))
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[self._number(field)] = self.rng.choice((0.5, float("nan")))
        elif field.is_repeated:
            self._change_column(message, field)
        elif field.message_type is not None:
            self._change(getattr(message, field.name))
        elif field.type == FieldDescriptor.TYPE_STRING:
            setattr(message, field.name, "x" * self.rng.randrange(9))
        else:
            setattr(message, field.name, self._number(field))

    def _change_column(self, message: Message, field: FieldDescriptor) -> None:
        column: Any = getattr(message, field.name)
        if column and self.rng.random() < 0.2:
            del column[self.rng.randrange(len(column))]
        elif field.message_type is not None:
            self._change(self.rng.choice(column) if column else column.add())
        elif column and self.rng.random() < 0.8:
            column[self.rng.randrange(len(column))] = self._number(field)
        else:
            column.append(self._number(field))

    def _number(self, field: FieldDescriptor) -> Any:
        kind = field.type
        if kind in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
            return self.rng.choice((0.0, -1.0, 0.5, 1e30, float("nan"), float("inf")))
        if kind == FieldDescriptor.TYPE_BOOL:
            return self.rng.random() < 0.5
        if kind == FieldDescriptor.TYPE_ENUM:
            return self.rng.randrange(6)
        if kind == FieldDescriptor.TYPE_UINT64 and self.rng.random() < 0.1:
            return 2**64 - 1
        return self.rng.choice(NUMBERS)


def fuzzed_epoch(bench: ParityBench, built: Built, epoch: int, mutator: Mutator) -> str:
    """Serve some requests, changing a plan now and then, until one is refused: the error's name."""
    built.runner.open(epoch)
    wrong_by = mutator.rng.choice((0.1, 0.5))

    def step(plan: pb.StepPlan) -> list[pb.StepResult]:
        if mutator.rng.random() < wrong_by:
            mutator.mutate(plan)
        return [built.runner.step(plan)]

    engine = LocalEngine(step, built.facts, epoch=epoch, depth=1)
    try:
        for request in mutator.rng.sample(bench.requests, k=4):
            engine.add(request)
        for _ in range(STEPS):
            engine.advance()
    except SurestepError as error:  # of the rank, or of the scheduler's books
        return type(error).__name__
    return "none"


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.rotates(2)
def test_a_rank_survives_any_plan(request: pytest.FixtureRequest, name: str) -> None:
    bench: ParityBench = request.getfixturevalue(name)
    tp, mutator = TensorParallel(), Mutator(SEED)
    built = build_runner(load(bench.folder, tp), tp, NEIGHBOURS["mixed"], DRAFTERS[name], 3)
    seen = {fuzzed_epoch(bench, built, epoch, mutator) for epoch in range(1, EPOCHS)}
    assert {"InvalidRequest", "LedgerError"} <= seen
    calm = LocalEngine(one_rank(built.runner, EPOCHS), built.facts, epoch=EPOCHS)
    for which, answer in calm.run(bench.requests[::4]).items():
        assert answer.token_ids == bench.expected[which].token_ids


# Fields without which every token is the same one; all others are missed by the rank or the ledger.
DISPENSABLE = {
    *("StepPlan.budget_ms", "Admission.request_id"),
    *("StepResult.digest", "StepResult.timings"),
    "StepResult.drafter_len",  # all 0 where it is left out, as without state in the drafter
    # Without these no other's answer is looked into, and nothing is kept for the rank that follows; no prefix
    # cache, and they are not sent.
    *("Admission.text_group", "StepPlan.planner"),
}
NOT_EVERYWHERE = {"StepResult.drafter_len", "Admission.text_group", "StepPlan.planner"}
STALE = (
    "StepResult.epoch"  # a result of another epoch is dropped: the step's deadline ends this one
)
MOST_STEPS = 300


class Stripper:
    """Takes one field out of every message, as a service of another version leaves it out."""

    def __init__(self, kind: type[Message], name: str) -> None:
        self.field = kind.DESCRIPTOR.fields_by_name[name]
        self.count = 0

    def strip(self, *messages: Message) -> None:
        for message in messages:
            if any(field is self.field for field, _ in message.ListFields()):
                message.ClearField(self.field.name)
                self.count += 1


POOLED = for_vectors([range(3, 20), range(5, 9)])


def answers_without(
    bench: ParityBench, built: Built, vectors: dict[str, bytes], epoch: int, stripper: Stripper
) -> str:
    """What requests get then: the same tokens and vectors, others, or the error's name."""
    built.runner.open(epoch)

    def step(plan: pb.StepPlan) -> list[pb.StepResult]:
        stripper.strip(plan, *plan.admissions)
        result = built.runner.step(plan)
        stripper.strip(result)
        return [result]

    engine = LocalEngine(step, built.facts, epoch=epoch, depth=1)
    try:
        for request in [*bench.requests[::3], *POOLED]:
            engine.add(request)
        for _ in range(MOST_STEPS):
            if not engine.state.open:
                break
            engine.advance()
        else:
            return "no end"
    except SurestepError as error:
        return type(error).__name__
    answers = engine.run([])
    equal = all(
        answer.pooled == vectors[n]
        if n in vectors
        else answer.token_ids == bench.expected[n].token_ids
        for n, answer in answers.items()
    )
    return "equal" if equal else "others"


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.rotates(3)
def test_a_field_that_is_left_out_changes_no_token(
    request: pytest.FixtureRequest, name: str
) -> None:
    bench: ParityBench = request.getfixturevalue(name)
    tp, seen = TensorParallel(), dict[str, str]()
    built = build_runner(load(bench.folder, tp), tp, NEIGHBOURS["mixed"], DRAFTERS[name], 3)
    alone = LocalEngine(one_rank(built.runner), built.facts, epoch=1, depth=0).run(POOLED)
    vectors = {name: answer.pooled for name, answer in alone.items()}
    kinds: list[type[Message]] = [pb.StepPlan, pb.Admission, pb.StepResult]
    fields = [(kind, each.name) for kind in kinds for each in kind.DESCRIPTOR.fields]
    for epoch, (kind, field) in enumerate(fields, 2):
        stripper = Stripper(kind, field)
        end = answers_without(bench, built, vectors, epoch, stripper)
        if stripper.count:
            seen[f"{kind.DESCRIPTOR.name}.{field}"] = end
    assert seen.pop(STALE) == "no end"
    equal = {field for field, end in seen.items() if end == "equal"}
    assert equal | NOT_EVERYWHERE == DISPENSABLE
    errors = {"InvalidRequest", "LedgerError", "InternalError"}
    assert {end for field, end in seen.items() if field not in DISPENSABLE} == errors
    assert {"Admission.label_ids", "StepResult.pooled"} < seen.keys()
    assert len(seen) > 35
