"""Requests of Dynamo mean what they say, are held, or are refused by name."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from surestep_cli.dynamo.command import Dynamo, warn_of_another
from surestep_cli.dynamo.request import Wanted, wanted
from surestep_common.errors import InvalidRequest
from surestep_proto.sampling_pb2 import SamplingDefaults

# As its frontend 1.6.1 sends a chat: every field, most of them null.
CHAT: dict[str, Any] = {
    "model": "m",
    "token_ids": [1, 5, 9],
    "stop_conditions": dict.fromkeys(
        ("max_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "min_tokens")
    )
    | {"stop_token_ids_hidden": [2], "ignore_eos": None, "max_thinking_tokens": None},
    "sampling_options": dict.fromkeys(
        ("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty")
    )
    | dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "use_beam_search", "seed"))
    | {"length_penalty": None, "include_stop_str_in_output": None, "guided_decoding": None},
    "output_options": {"logprobs": None, "prompt_logprobs": None, "skip_special_tokens": None},
    "eos_token_ids": [2],
    "annotations": [],
    "routing": {},
}
PARTS = {
    **dict.fromkeys(("max_tokens", "min_tokens", "ignore_eos"), "stop_conditions"),
    **dict.fromkeys(("stop_token_ids", "max_thinking_tokens"), "stop_conditions"),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), "output_options"),
    "cache_salt": "routing",
}


def asked(identity: str = "a", defaults: SamplingDefaults | None = None, **fields: Any) -> Wanted:
    request = {name: dict(part) if isinstance(part, dict) else part for name, part in CHAT.items()}
    for name, value in fields.items():
        if name in ("token_ids", "multi_modal_data", "stop_conditions"):
            request[name] = value
        else:
            request[PARTS.get(name, "sampling_options")][name] = value
    return wanted(request, identity, defaults or SamplingDefaults())


def test_a_chat_that_asks_for_nothing_leaves_it_to_the_model() -> None:
    found = asked()
    assert (found.prompt_ids, found.held) == ([1, 5, 9], False)
    assert found.options["max_tokens"] is None
    assert list(found.sampling.stop_token_ids) == [2]
    assert not any(found.sampling.HasField(name) for name in ("temperature", "top_p", "top_k"))


def test_every_parameter_arrives() -> None:
    found = asked(
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.2,
        seed=7,
        logit_bias={"3": 2.0},
        max_tokens=4,
        ignore_eos=True,
        stop_token_ids=[8],
        logprobs=2,
        prompt_logprobs=3,
        cache_salt="s",
    )
    sampling = found.sampling
    assert [sampling.temperature, sampling.top_p] == pytest.approx([0.5, 0.9])
    assert [sampling.min_p, sampling.repetition_penalty] == pytest.approx([0.1, 1.2])
    assert (sampling.top_k, sampling.seed, dict(sampling.logit_bias)) == (0, 7, {3: 2.0})
    assert list(sampling.stop_token_ids) == [2, 8]
    assert (sampling.want_logprobs, sampling.num_top_logprobs) == (True, 2)
    assert (sampling.want_prompt_logprobs, sampling.num_top_prompt_logprobs) == (True, 3)
    assert found.options == {"max_tokens": 4, "ignore_eos": True, "cache_salt": "s"}


def test_a_seed_that_was_not_given_follows_from_the_id() -> None:
    assert asked("a").sampling.seed == asked("a").sampling.seed != asked("b").sampling.seed


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"min_tokens": 3}, False),
        ({"bad_words_token_ids": [[4, 5]]}, True),
        ({"prompt_logprobs": 0}, True),
        ({"repetition_penalty": 1.3}, False),
        ({"presence_penalty": 0.0}, False),
    ],
)
def test_answers_that_could_not_be_migrated_are_held(fields: dict[str, Any], held: bool) -> None:
    assert asked(**fields).held is held


def test_so_are_those_whose_penalty_is_the_operators() -> None:
    defaults = SamplingDefaults(presence_penalty=0.5)
    assert asked(defaults=defaults).held
    assert not asked(defaults=defaults, presence_penalty=0.0).held


@pytest.mark.parametrize(
    ("guided", "says"),
    [
        ({"json": {"type": "object"}}, '"type": "object"'),
        ({"json": '{"type": "array"}', "backend": "xgrammar"}, '"type": "array"'),
        ({"regex": "a/b"}, "a\\\\/b"),
        ({"choice": ["yes", "no"]}, "yes"),
        ({"grammar": "start: /x/"}, "start: /x/"),
    ],
)
def test_constraints_become_grammars(guided: dict[str, Any], says: str) -> None:
    source = asked(guided_decoding=guided).sampling.grammar.source
    assert says in source
    assert json.loads(source)["grammars"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"max_thinking_tokens": 9}, "max_thinking_tokens"),
        ({"prompt_logprobs": "x"}, "prompt_logprobs"),
        ({"multi_modal_data": {"image": []}}, "multi_modal_data"),
        ({"guided_decoding": {"structural_tag": {}}}, "guided_decoding"),
        ({"guided_decoding": {"json": {}, "regex": "a"}}, "guided_decoding"),
        ({"guided_decoding": {"json": "["}}, "json_schema"),
        ({"guided_decoding": {"choice": 5}}, None),
        ({"guided_decoding": {"regex": 5}}, None),
        ({"guided_decoding": []}, None),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"top_k": 1e300}, None),
        ({"max_tokens": -1}, None),
        ({"logit_bias": {"x": 1}}, None),
        ({"logit_bias": {"-1": 1}}, None),
        ({"stop_token_ids": [-1]}, None),
        ({"bad_words_token_ids": [5]}, None),
        ({"stop_conditions": 3}, "stop_conditions"),
        ({"stop_conditions": {"stop_after_s": 2}}, "stop_after_s"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(**fields)
    assert param is None or refused.value.param == param


@pytest.mark.parametrize("found", [None, ModuleType("dynamo")], ids=["none", "another"])
def test_without_a_dynamo_that_fits_the_command_says_which(
    found: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "dynamo"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "surestep_cli.dynamo.engine", raising=False)
    monkeypatch.setitem(sys.modules, "dynamo", found)
    with pytest.raises(InvalidRequest, match=r"dynamo.*pip install --no-deps ai-dynamo==1\.6\.1"):
        Dynamo().run(Console())


def test_another_dynamo_than_was_tried_is_named(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_another("1.6.1")
    assert not caplog.messages
    warn_of_another("1.9.0")
    assert caplog.messages == ["ai-dynamo 1.9.0 is installed, and only 1.6.1 was tried"]
