"""Requests with grammars: each kind of grammar, with every sampling parameter that may disagree."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
from llguidance import LLMatcher
from support.checkpoints import ascii_tokenizer
from support.parity.cases import EOS, NEUTRAL, SEED, TEMPERATURES, VOCAB, Probe, make_request
from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.core.sequence import Request
from surestep_worker.grammar.compiler import Compiler
from surestep_worker.step.runner import Runner
from tokenizers import Tokenizer

COMPILED_S = 60.0  # after which a grammar is
_COMPILERS = dict[Path, Compiler]()  # of the grammars of a folder's tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5, "pattern": "^[a-z]*$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
REGEX = r"[a-c]{2,4}-[0-9]{2,5}(x|yz){0,3}"
CHOICES = ("alphabet", "alpha beta", "gamma", "delta delta")
LARK = 'start: "(" item ("," item)* ")"\nitem: /[a-z]{1,3}/ | start'

COMPACT = LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False})
OBJECT = LLMatcher.grammar_from_json_schema(  # of little choice, for tests of single walks
    {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    defaults={"whitespace_flexible": False},
)
SOURCES = {
    "schema": COMPACT,
    "spaced": LLMatcher.grammar_from_json_schema(SCHEMA),
    "regex": LLMatcher.grammar_from_regex(REGEX),
    "choice": LLMatcher.grammar_from_regex("|".join(CHOICES)),
    "lark": LLMatcher.grammar_from_lark(LARK),
}


def with_tokenizer(make: Callable[[Path], object], folder: Path) -> None:
    """Make a checkpoint of the parity matrix, with a tokenizer beside it."""
    make(folder)
    ascii_tokenizer.save(folder, VOCAB)


def make_guided_requests(probe: Probe) -> list[Request]:
    """One request per case and temperature. What a case needs to know it asks `probe`."""
    rng = random.Random(SEED)
    requests = list[Request]()
    for temperature in TEMPERATURES:
        for name, case in _CASES.items():
            prompt = [3 + len(requests), *rng.choices(range(3, VOCAB), k=rng.randrange(2, 6))]
            plain = {"temperature": temperature, "seed": rng.getrandbits(64), **NEUTRAL}
            full_name = f"{name}@{temperature}"
            changes = case(partial(probe, make_request(full_name, prompt, plain)))
            params = {"stop_token_ids": [EOS], **plain, **changes}
            requests.append(make_request(full_name, prompt, params))
    return requests


def _asks(source: str, **params: Any) -> Callable[[Callable[[], list[int]]], dict[str, Any]]:
    return lambda _: {"grammar": pb.Grammar(source=SOURCES[source]), **params}


def _behind(
    start: int, end: int, **params: Any
) -> Callable[[Callable[[], list[int]]], dict[str, Any]]:
    """Begin behind these tokens of the answer without a grammar, which is the answer until then."""

    def case(answer: Callable[[], list[int]]) -> dict[str, Any]:
        grammar = pb.Grammar(source=COMPACT, begins_after=answer()[start:end])
        return {"grammar": grammar, **params}

    return case


_CASES: dict[str, Callable[[Callable[[], list[int]]], dict[str, Any]]] = {
    **{name: _asks(name) for name in SOURCES},
    "top_k": _asks("schema", top_k=7),
    "top_p": _asks("spaced", top_p=0.6),
    "penalties": _asks("lark", repetition_penalty=1.4, presence_penalty=1.5, frequency_penalty=0.9),
    "logit_bias": _asks("schema", logit_bias={40: 5.0, 60: -30.0}),
    "min_p": _asks("regex", min_p=0.2),
    "min_tokens": _asks("regex", min_tokens=6),
    "other stops": _asks("lark", stop_token_ids=[EOS, 0, 30, 31]),
    "logprobs": _asks("schema", want_logprobs=True, num_top_logprobs=3),
    "reasoning": _behind(6, 7),
    "long end": _behind(4, 7, want_logprobs=True),
    "everything": _asks(
        "spaced",
        top_k=12,
        top_p=0.7,
        min_p=0.05,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        logit_bias={17: 1.0},
        min_tokens=5,
        stop_token_ids=[EOS, 31],
        want_logprobs=True,
        num_top_logprobs=2,
        want_prompt_logprobs=True,
    ),
}


class Reader:
    """Says whether answers belong to the grammars of their requests."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def check(self, name: str, ids: list[int]) -> None:
        """Raise for an answer that ended by itself and is not what its case asks for."""
        text, case = self.text(ids[:-1]), name.partition("@")[0]  # the last one is a stop id
        if case in ("regex", "min_p", "min_tokens"):
            assert re.fullmatch(REGEX, text), text
        elif case == "choice":
            assert text in CHOICES
        elif case in ("lark", "penalties", "other stops"):
            assert re.fullmatch(r"[a-z(),]+", text), text
            assert text.count("(") == text.count(")"), text
        else:
            begin = text.rindex("{")  # behind the reasoning, if there is any
            jsonschema.validate(json.loads(text[begin:]), SCHEMA)


def compile_grammars(runner: Runner, folder: Path | None) -> None:
    """Compile those of the matrix ahead, as a scheduler asks for; once for all runners."""
    if runner.context.grammars._compiler is None or folder is None:
        return
    compiler = _COMPILERS.setdefault(folder, runner.context.grammars._compiler)
    runner.context.grammars._compiler = compiler
    for source in SOURCES.values():
        compiler.start(source).result(COMPILED_S)
