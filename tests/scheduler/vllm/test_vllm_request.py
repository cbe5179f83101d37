"""Every field of a request of vllm.grpc.engine: served, refused by name, or told to have no effect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clients.vllm_wire import TABLE, fields, new
from surestep_common.errors import InvalidRequest, RequestTooLarge
from surestep_common.request_params import MAX_LOGPROBS, sibling_seed
from surestep_proto import vllm_engine_pb2 as pb
from surestep_proto.scheduler_pb2 import GenerateRequest
from surestep_scheduler.core.limits import Limits
from surestep_scheduler.speculation.draft_length import StepCosts
from surestep_scheduler.vllm.request import MAX_N, choices, without_effect

LIMITS = Limits(
    num_slots=4,
    num_blocks=17,
    block_size=4,
    max_model_len=64,
    vocab_size=101,
    max_num_batched_tokens=64,
    max_draft_tokens=0,
    max_queue_len=4,
    pipeline_depth=1,
    costs=StepCosts.measured(([1, 64], [10, 10]), ([1], [0]), 0.0, max_tokens=64),
)
# What a request has that says nothing.
PLAIN = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}

SERVED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.5,
    "max_tokens": 9,
    "min_tokens": 3,
    "stop_token_ids": [5, 6],
    "ignore_eos": True,
    "n": 3,
    "logprobs": 2,
    "prompt_logprobs": 0,
    "seed": -4,
    "logit_bias": [{"key": 3, "value": -2.5}],
    "truncate_prompt_tokens": 2,
}
CONSTRAINTS: dict[str, Any] = {
    "json_schema": '{"type": "integer"}',
    "regex": "a/b",
    "grammar": 'start: "a"',
    "json_object": True,
    "choice": {"choices": ["a", 'b"']},
}
REFUSED: dict[str, Any] = {"structural_tag": "{}"}
TOLD = {"stop": ["a"], "include_stop_str_in_output": True}
TOLD_BY_NUMBER = {"of_a_later_version": 1}
# About text, of which clients of a server without text know that it is theirs.
SILENT = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "grammar_from_first_token": True,
}
NO_EFFECT: dict[str, Any] = {**SILENT, **TOLD, **TOLD_BY_NUMBER}
REFUSED_OF_REQUEST: dict[str, Any] = {
    "text": "hello",
    "kv_transfer_params": {"remote_host": "other"},
    "kv_transfer_params_json": "{}",
    "mm_inputs": {},
    "extra_mm_inputs": [{}],
    "media_refs": {},
    "data_parallel_rank": 1,
}
SERVED_OF_REQUEST = {"request_id", "tokenized", "sampling_params", "stream"}


def theirs(sampling: dict[str, Any] | None = None, **changes: Any) -> pb.GenerateRequest:
    """A request as it comes over their wire."""
    values: dict[str, Any] = {"request_id": "a", "tokenized": {"input_ids": [1, 2, 3]}, **changes}
    if sampling is not None:
        values["sampling_params"] = sampling
    return pb.GenerateRequest.FromString(new("GenerateRequest", **values).SerializeToString())


def ours(**sampling: Any) -> list[GenerateRequest]:
    return list(choices(theirs(sampling), LIMITS))


def test_every_sampling_field_has_a_verdict() -> None:
    verdicts = [SERVED, CONSTRAINTS, REFUSED, TOLD, SILENT, TOLD_BY_NUMBER]
    named = [name for verdict in verdicts for name in verdict]
    assert sorted(named) == sorted(field.name for field in fields(TABLE)["SamplingParams"])


def test_every_field_of_a_request_has_a_verdict() -> None:
    named = [*REFUSED_OF_REQUEST, *SERVED_OF_REQUEST, *TOLD_BY_NUMBER]
    assert sorted(named) == sorted(field.name for field in fields(TABLE)["GenerateRequest"])


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served_changes_our_request(name: str) -> None:
    assert ours(**{name: SERVED[name]}) != ours()


@pytest.mark.parametrize("name", NO_EFFECT)
def test_what_has_no_effect_changes_nothing(name: str) -> None:
    value = NO_EFFECT[name]
    assert ours(**{name: value}) == ours()
    told = {**dict.fromkeys(TOLD, name), "of_a_later_version": "sampling_params.field 900"}
    expected = [told[name]] if name in told else []
    assert without_effect(theirs({name: value})) == expected


def test_fields_of_later_versions_are_told_of_by_number() -> None:
    assert without_effect(theirs({}, of_a_later_version=1)) == ["field 900"]
    assert without_effect(theirs()) == []


@pytest.mark.parametrize("name", REFUSED)
def test_structural_tags_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name}: not served") as raised:
        ours(**{name: REFUSED[name]})
    assert raised.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json_schema", "{"),
        ("json_schema", "[1]"),
        ("json_schema", "[" * 100_000),
        ("choice", {"choices": []}),
    ],
)
def test_constraints_that_are_none_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as raised:
        ours(**{name: value})
    assert raised.value.param == name


def test_no_object_asked_for_is_no_constraint() -> None:
    assert ours(json_object=False) == ours()


@pytest.mark.parametrize("name", REFUSED_OF_REQUEST)
def test_fields_of_a_request_are_refused_by_name(name: str) -> None:
    changes = {name: REFUSED_OF_REQUEST[name]}
    if name == "text":
        changes["tokenized"] = None
    with pytest.raises(InvalidRequest, match=name) as raised:
        choices(theirs(**changes), LIMITS)
    assert raised.value.param == name


def test_rank_zero_is_the_one_there_is() -> None:
    assert list(choices(theirs(data_parallel_rank=0), LIMITS)) == ours()


@pytest.mark.parametrize(
    ("param", "sampling"),
    [
        ("n", {"n": MAX_N + 1}),
        ("n", {"n": (1 << 32) - 1}),
        ("logprobs", {"logprobs": -1}),
        ("logprobs", {"logprobs": MAX_LOGPROBS + 1}),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
        ("logit_bias", {"logit_bias": [{"key": -1, "value": 1.0}]}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 66}),
        ("stop_token_ids", {"stop_token_ids": [1] * 2049}),
    ],
)
def test_wrong_values_are_refused_by_name(param: str, sampling: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        ours(**sampling)
    assert raised.value.param == param


@pytest.mark.parametrize("changes", [{"tokenized": {}}, {"tokenized": None}, {"request_id": ""}])
def test_what_is_missing_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        choices(theirs(**changes), LIMITS)
    assert raised.value.param == ("request_id" if "request_id" in changes else "input_ids")


def test_a_prompt_that_leaves_no_room_is_refused_before_it_is_copied() -> None:
    with pytest.raises(RequestTooLarge, match="no room for output"):
        choices(theirs({"n": MAX_N}, tokenized={"input_ids": [1] * 64}), LIMITS)


@pytest.mark.parametrize(
    ("sampling", "fits"),
    [
        ({"max_tokens": 1 << 12, "logprobs": 127, "n": 8}, True),
        ({"max_tokens": 1 << 12, "logprobs": 128, "n": 8}, False),
        ({"logprobs": 3}, True),
        ({"logprobs": 4}, False),  # no bound of its own: as many as fit
        ({"max_tokens": 1, "logprobs": 128, "n": 128}, True),
        ({"prompt_logprobs": 128}, True),  # these have a bound of their own
    ],
)
def test_an_answer_in_one_piece_has_a_bound(sampling: dict[str, Any], fits: bool) -> None:
    long = replace(LIMITS, num_blocks=1 << 20, max_model_len=(1 << 20) + 3)
    assert list(choices(theirs(sampling, stream=True), long))
    if fits:
        assert list(choices(theirs(sampling), long))
        return
    with pytest.raises(RequestTooLarge, match="ask for a stream"):
        choices(theirs(sampling), long)


def test_a_prompt_keeps_its_end() -> None:
    prompt = {"input_ids": list(range(100))}
    cut = next(choices(theirs({"truncate_prompt_tokens": 5}, tokenized=prompt), LIMITS))
    assert list(cut.prompt_ids) == [95, 96, 97, 98, 99]
    fitted = next(choices(theirs({"truncate_prompt_tokens": -1}, tokenized=prompt), LIMITS))
    assert list(fitted.prompt_ids) == list(range(37, 100))


def test_sequences_have_ids_and_seeds_of_their_own() -> None:
    requests = ours(n=3, seed=9)
    assert [one.request_id for one in requests] == ["vllm/0/a", "vllm/1/a", "vllm/2/a"]
    assert [one.sampling.seed for one in requests] == [sibling_seed(9, i) for i in range(3)]
    assert not any(one.sampling.HasField("seed") for one in ours(n=3))


_FLOATS = st.floats(0.0, 2.0, width=32)
_IDS = st.integers(0, 100)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": _FLOATS,
            "top_p": _FLOATS,
            "top_k": st.integers(0, 100),
            "min_p": _FLOATS,
            "frequency_penalty": _FLOATS,
            "presence_penalty": _FLOATS,
            "repetition_penalty": _FLOATS,
            "max_tokens": st.integers(0, 100),
            "min_tokens": st.integers(0, 100),
            "stop_token_ids": st.lists(_IDS, max_size=5),
            "ignore_eos": st.booleans(),
            "n": st.integers(0, 5),
            "logprobs": st.integers(0, MAX_LOGPROBS),
            "prompt_logprobs": st.integers(0, MAX_LOGPROBS),
            "seed": st.integers(-(1 << 31), (1 << 31) - 1),
            "logit_bias": st.dictionaries(_IDS, _FLOATS, max_size=5),
        },
    )
)
def test_sampling_parameters_survive_the_way(given_values: dict[str, Any]) -> None:
    wire = dict(given_values)
    if "logit_bias" in wire:
        biases = wire["logit_bias"].items()
        wire["logit_bias"] = [{"key": key, "value": value} for key, value in biases]
    requests = ours(**wire)
    assert len(requests) == max(1, given_values.get("n", 1))
    for index, one in enumerate(requests):
        _assert_same(one, given_values, index)


def _assert_same(one: GenerateRequest, values: dict[str, Any], index: int) -> None:
    sampling = one.sampling
    for name in ("temperature", "top_k", "min_p", "frequency_penalty", "presence_penalty"):
        assert sampling.HasField(name)  # a default of the model must not take its place
        assert getattr(sampling, name) == values.get(name, PLAIN.get(name, 0))
    for name in ("top_p", "repetition_penalty"):
        assert getattr(sampling, name) == (values.get(name) or 1.0)
    assert one.HasField("max_tokens") == ("max_tokens" in values)
    assert one.max_tokens == values.get("max_tokens", 0)
    assert sampling.min_tokens == values.get("min_tokens", 0)
    assert list(sampling.stop_token_ids) == values.get("stop_token_ids", [])
    assert one.ignore_eos == values.get("ignore_eos", False)
    assert dict(sampling.logit_bias) == values.get("logit_bias", {})
    for theirs_, want, count in (
        ("logprobs", "want_logprobs", "num_top_logprobs"),
        ("prompt_logprobs", "want_prompt_logprobs", "num_top_prompt_logprobs"),
    ):
        assert getattr(sampling, want) == (theirs_ in values)
        assert getattr(sampling, count) == values.get(theirs_, 0)
    assert sampling.HasField("seed") == ("seed" in values)
    if "seed" in values:
        assert sampling.seed == sibling_seed(values["seed"], index)
