"""Grammars over gRPC on a whole server: what a client gets, while workers and the scheduler die."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from e2e.conftest import FLAGS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.ports import free_address
from support.processes.stack import Stack, serve
from surestep.client import Client, SamplingParams
from surestep_common.errors import InvalidRequest
from surestep_proto.sampling_pb2 import Grammar
from tokenizers import Tokenizer

pytestmark = [pytest.mark.timeout(240), pytest.mark.rotates(3, turn=0)]
KEY = "a key of a client"
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"key": {"enum": ["first", "second"]}, "value": {"type": "integer"}},
        "required": ["key", "value"],
        "additionalProperties": False,
    },
    "minItems": 24,
    "maxItems": 24,
}
PROMPT = [97, 98, 99, 97, 98]


def compact(schema: Any) -> Grammar:
    source = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
    return Grammar(source=source)


class Served:
    def __init__(self, stack: Stack, address: str, model: Path) -> None:
        self.stack, self.address = stack, address
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def ask(self, grammar: Grammar, max_tokens: int = 1500, **params: Any) -> list[int]:
        sampling = SamplingParams(grammar=grammar, **{"temperature": 1.0, **params})
        with Client(self.address, api_key=KEY) as client:
            return list(client.generate(PROMPT, sampling, max_tokens=max_tokens).token_ids)

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_checkpoint(model, "llama", seed=7, tokenizer=True, max_position=2048)
    address = free_address()
    door = ("--scheduler-listen", address, "--grpc-api-key", KEY)
    logs = tmp_path_factory.mktemp("logs")
    with serve(model, logs, *FLAGS, *door, "--speculative-config", DRAFTS) as stack:
        yield Served(stack, address, model)


def test_a_bad_grammar_is_refused_before_it_runs(served: Served) -> None:
    for source, said in (("start: nowhere", "nowhere"), ("", "empty"), ("x" * 300_000, "bytes")):
        with pytest.raises(InvalidRequest, match=said):
            served.ask(Grammar(source=source))
    assert served.stack.is_ready()


def test_a_request_whose_other_parameters_bar_what_its_grammar_allows_fails_alone(
    served: Served,
) -> None:
    choice = Grammar(source=LLMatcher.grammar_from_regex("yes|no"))
    with ThreadPoolExecutor(2) as threads:
        fine = threads.submit(served.ask, compact(SCHEMA), seed=1)
        with pytest.raises(InvalidRequest, match="leave no token"):
            served.ask(choice, allowed_token_ids=[5, 6])
        assert served.text(served.ask(choice, min_tokens=20)) in ("yes", "no")
    jsonschema.validate(json.loads(served.text(fine.result())), SCHEMA)


LEAVES = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 6},
        {"enum": ["a", 1, None, "längst"]},
        {"type": "number", "minimum": -3, "maximum": 12},
        {"type": "string", "pattern": "^[A-F]{2}-[0-9]$"},
    ]
)


def _object(parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": parts,
        "required": sorted(parts)[::2],
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.text("abkeyé ", min_size=1, max_size=8), inner, max_size=3).map(_object),
        inner.map(lambda s: {"type": "array", "items": s, "minItems": 1, "maxItems": 2}),
        st.lists(inner, min_size=1, max_size=3).map(lambda s: {"anyOf": s}),
    ),
    max_leaves=4,
)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(SCHEMAS, st.sampled_from([0.0, 0.7, 2.0]), st.integers(0, 2**63))
def test_every_document_is_valid(
    served: Served, schema: dict[str, Any], temperature: float, seed: int
) -> None:
    ids = served.ask(compact(schema), 600, temperature=temperature, seed=seed)
    if len(ids) < 600:  # numbers may go on for ever
        jsonschema.validate(json.loads(served.text(ids)), schema)


def test_documents_are_the_same_while_workers_and_the_scheduler_are_killed(served: Served) -> None:
    grammar, seeds = compact(SCHEMA), range(4)
    expected = [served.ask(grammar, seed=seed) for seed in seeds]
    for ids in expected:
        jsonschema.validate(json.loads(served.text(ids)), SCHEMA)
    stream = _stream(served, grammar, seed=0)
    early = list(next(stream).token_ids) + list(next(stream).token_ids)
    status = served.stack.scheduler()
    os.kill(status["ranks"][0]["pid"], signal.SIGKILL)
    with ThreadPoolExecutor(len(seeds)) as threads:
        others = [threads.submit(served.ask, grammar, seed=seed) for seed in seeds[1:]]
        early += next(stream).token_ids
        os.kill(served.stack.scheduler()["pid"], signal.SIGKILL)
        for chunk in stream:
            early += chunk.token_ids
        assert [early, *(other.result() for other in others)] == expected


def _stream(served: Served, grammar: Grammar, seed: int) -> Any:
    with Client(served.address, api_key=KEY) as client:
        sampling = SamplingParams(grammar=grammar, temperature=1.0, seed=seed)
        yield from client.stream(PROMPT, sampling, max_tokens=1500)
