from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.fakes.scheduler import default_info
from surestep_common.errors import InvalidRequest
from surestep_common.request_params import SHAPING, neutral, sibling_seed
from surestep_gateway.request.prepared import bad_words, fit_prompt, max_tokens, sampling_params
from surestep_gateway.request.protocol import ChatBody, CompletionBody, GenerationBody
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_proto.sampling_pb2 import SamplingParams

INFO = default_info()


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate(fields)


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate(fields)


def params(body: GenerationBody, tokenizer: Tokenizer) -> SamplingParams:
    words = bad_words(body.bad_words or (), tokenizer, 1)
    return sampling_params(body, INFO, max_logprobs=20, bad_words=words)


def test_nothing_given_stays_open_for_the_scheduler(tokenizer: Tokenizer) -> None:
    assert params(chat(), tokenizer) == SamplingParams()


def test_neutral_values_that_are_given_are_sent(tokenizer: Tokenizer) -> None:
    given = {name: getattr(neutral(), name) for name in SHAPING} | {"temperature": 0}
    got = params(chat(**given), tokenizer)
    assert {name: getattr(got, name) for name in given} == given
    assert all(got.HasField(name) for name in given)


def test_explicit_nulls_mean_the_same_as_nothing(tokenizer: Tokenizer) -> None:
    nulls = dict.fromkeys(ChatBody.model_fields)
    assert params(chat(**nulls), tokenizer) == params(chat(), tokenizer)


def test_every_parameter_arrives(tokenizer: Tokenizer) -> None:
    got = params(
        chat(
            temperature=0.5,
            top_k=7,
            top_p=0.25,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.75,
            min_tokens=3,
            ignore_eos=True,
            stop_token_ids=[9, 4],
            logit_bias={"5": -100, "6": 1.5},
            allowed_token_ids=[5, 6],
            logprobs=True,
            top_logprobs=2,
            prompt_logprobs=1,
        ),
        tokenizer,
    )
    assert got == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        min_tokens=3,
        stop_token_ids=[4, 9],
        logit_bias={5: -100, 6: 1.5},
        allowed_token_ids=[5, 6],
        want_logprobs=True,
        num_top_logprobs=2,
        want_prompt_logprobs=True,
        num_top_prompt_logprobs=1,
    )


def test_top_k_of_minus_one_is_off(tokenizer: Tokenizer) -> None:
    assert params(chat(top_k=-1), tokenizer).top_k == 0


def test_bad_words_are_spelled_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    got = [list(word.token_ids) for word in params(chat(bad_words=["dog"]), tokenizer).bad_words]
    bare = tokenizer.encode_now("dog", add_special_tokens=False)
    spaced = tokenizer.encode_now(" dog", add_special_tokens=False)
    assert got == [bare, spaced]


def test_an_echo_with_logprobs_wants_those_of_the_prompt(tokenizer: Tokenizer) -> None:
    got = params(completion(echo=True, logprobs=3), tokenizer)
    assert (got.want_prompt_logprobs, got.num_top_prompt_logprobs) == (True, 3)
    assert not params(completion(echo=True), tokenizer).want_prompt_logprobs


def test_default_length() -> None:
    assert max_tokens(completion(), 10, INFO) == 16
    assert max_tokens(completion(), 250, INFO) == 6
    assert max_tokens(chat(), 10, INFO) is None  # the scheduler knows
    assert max_tokens(chat(max_tokens=5, max_completion_tokens=7), 10, INFO) == 7


@pytest.mark.parametrize("make", [chat, completion])
def test_the_context_bounds_what_is_asked_for(make: Callable[..., GenerationBody]) -> None:
    assert max_tokens(make(max_tokens=246), 10, INFO) == 246
    assert max_tokens(make(max_tokens=256), 10, INFO) == 246
    assert max_tokens(make(max_tokens=9999), 10, INFO) == 246
    with pytest.raises(InvalidRequest, match="min_tokens=250 exceeds max_tokens=246"):
        max_tokens(make(max_tokens=256, min_tokens=250), 10, INFO)


@pytest.mark.parametrize(
    ("keep", "kept"), [(None, 100), (30, 30), (200, 100), (100, 100), (-1, 100)]
)
def test_truncation_keeps_the_end(keep: int | None, kept: int) -> None:
    ids = list(range(100))
    got = fit_prompt(ids, completion(truncate_prompt_tokens=keep), INFO, "prompt")
    assert got == ids[-kept:]


def test_minus_one_truncates_to_what_fits() -> None:
    got = fit_prompt(list(range(300)), completion(truncate_prompt_tokens=-1), INFO, "prompt")
    assert got == list(range(300))[-255:]


def test_a_prompt_must_leave_room_for_a_token() -> None:
    assert len(fit_prompt([1] * 255, completion(), INFO, "prompt")) == 255
    with pytest.raises(InvalidRequest, match="256 tokens"):
        fit_prompt([1] * 256, completion(), INFO, "prompt")


def test_siblings_have_their_own_seeds() -> None:
    # splitmix64 from state 0 (Vigna's reference implementation): its first three outputs.
    assert sibling_seed(0, 1) == 0xE220A8397B1DCDAF
    assert sibling_seed(0, 2) == 0x6E789E6AA1B965F4
    assert sibling_seed(0, 3) == 0x06C45D188009454F
    assert sibling_seed(-1, 0) == (1 << 64) - 1
    assert len({sibling_seed(-5, i) for i in range(100)}) == 100
