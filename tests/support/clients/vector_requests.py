"""Requests that want a vector, as the scheduler's core knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.core.sequence import Request

HIDDEN_STATES = {"last": pb.LAST_TOKEN, "mean": pb.MEAN}  # as any model has them
POOLINGS = {**HIDDEN_STATES, "labels": pb.LABEL_LOGITS}
LABELS = (7, 3, 60)


def labels_of(pooling: int) -> tuple[int, ...]:
    """The tokens that a request with this pooling judges."""
    return LABELS if pooling == pb.LABEL_LOGITS else ()


def for_a_vector(request: Request, pooling: int) -> Request:
    """The same prompt of the same tenant, of which a vector is wanted."""
    return replace(
        request,
        pooling=pooling,
        label_ids=labels_of(pooling),
        emitted_ids=[],
        max_tokens=1,
        stop_ids=frozenset(),
        draft_cap=None,
        want_prompt_logprobs=False,
        sampling=None,
    )


def for_vectors(
    prompts: Sequence[Sequence[int]], poolings: Mapping[str, int] = POOLINGS
) -> list[Request]:
    """Every prompt with every pooling."""
    return [
        Request(
            id=f"{name} {index}",
            prompt_ids=list(prompt),
            emitted_ids=[],
            max_tokens=1,
            pooling=pooling,
            label_ids=labels_of(pooling),
        )
        for index, prompt in enumerate(prompts)
        for name, pooling in poolings.items()
    ]
