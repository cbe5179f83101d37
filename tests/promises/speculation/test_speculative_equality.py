"""Speculation changes no token: any drafter, any draft length, any parameter, any neighbours."""

from __future__ import annotations

import pytest
import torch
from support.parity import drafters
from support.parity.drafters import NO_CONTEXT
from support.references.sampling import choose, params
from support.references.toy_decoding import VOCAB, Decoded, Decoding, Request, ToyModel
from surestep_worker.drafters import DRAFTERS, DeviceDrafter
from surestep_worker.drafters.config import SpeculativeConfig

MODEL_SEED, STOP = 99, 5
MODEL = ToyModel(MODEL_SEED)
STATELESS = ("ngram", *drafters.CHARACTERS)  # what drafts from tokens alone
SHAPING: dict[str, dict[str, object]] = {
    "plain": {},
    "stop": {"stop_token_ids": [STOP, 6]},
    "min_tokens": {"stop_token_ids": [STOP, 6, 7, 8], "min_tokens": 13},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.7},
    "logit_bias": {"logit_bias": {3: 2.5, 4: -9.0}},
    "allowed": {"allowed_token_ids": [1, 2, 3, STOP, 9, 17]},
    "bad_words": {"bad_words": [[4], [1, 2], [9, 9], [3, 1, 7]], "logit_bias": {1: 2.0, 9: 2.0}},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {2: 1.0},
        "stop_token_ids": [STOP],
        "min_tokens": 4,
        "bad_words": [[2, 3]],
    },
}
DRAWING: dict[str, dict[str, object]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.2, "top_k": 4},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
}
NAMES = [f"{shaping}/{drawing}" for shaping in SHAPING for drawing in DRAWING]


def _requests() -> list[Request]:
    """One per combination of parameters; prompts differ, so that the oracle tells them apart."""
    return [
        Request(
            prompt=[n % VOCAB, n // VOCAB, 11, n * 7 % VOCAB][: 2 + n % 3],
            params=params(**SHAPING[shaping], **DRAWING[drawing], seed=n * 2**57 + n),
            max_tokens=10 + n % 20,
        )
        for n, (shaping, drawing) in enumerate((s, d) for s in SHAPING for d in DRAWING)
    ]


@pytest.fixture(scope="module")
def plain() -> Decoded:
    """The run without speculation, which the oracle then knows."""
    requests = _requests()
    decoded = Decoding(MODEL, requests).run(None, 0)
    full = [r.prompt + ids for r, ids in zip(requests, decoded.output, strict=True)]
    drafters.TRUTH.learn(full, vocab_size=VOCAB, stop_id=STOP)
    return decoded


def _run(method: str, k: int, requests: list[Request]) -> Decoded:
    config = SpeculativeConfig(
        method=method, num_speculative_tokens=k, prompt_lookup_max=2, prompt_lookup_min=1
    )
    drafter = DRAFTERS.get(method)(config, NO_CONTEXT)
    assert not isinstance(drafter, DeviceDrafter)
    return Decoding(MODEL, requests).run(drafter, k)


def test_plain_run_is_as_restated(plain: Decoded) -> None:
    """Token by token, from the plain restatement of the pipeline."""
    for request, output in zip(_requests(), plain.output, strict=True):
        known = list(request.prompt)
        for token_id in output:
            table, length = torch.tensor([known]), torch.tensor([len(known)])
            logits = MODEL.logits(table, torch.zeros(1).long(), length)[0].tolist()
            assert token_id == choose(logits, known, len(request.prompt), request.params)
            known.append(token_id)


@pytest.mark.parametrize("k", range(6))
@pytest.mark.parametrize("method", STATELESS)
def test_no_drafter_changes_a_token(method: str, k: int, plain: Decoded) -> None:
    decoded = _run(method, k, _requests())
    changed = [
        name
        for name, ids, want in zip(NAMES, decoded.output, plain.output, strict=True)
        if ids != want
    ]
    assert changed == []


@pytest.mark.parametrize("method", ["oracle", "ragged", "flip-1"])
def test_neighbours_do_not_matter(method: str, plain: Decoded) -> None:
    requests = _requests()
    for n in range(0, len(requests), 3):
        assert _run(method, 4, requests[n : n + 1]).output == [plain.output[n]], NAMES[n]


def test_drafters_have_the_character_they_claim(plain: Decoded) -> None:
    """Or the tests above would compare a run with itself."""
    runs = {name: _run(name, 4, _requests()) for name in STATELESS}
    rate = {name: run.n_accepted / max(1, run.n_drafts) for name, run in runs.items()}
    assert rate["oracle"] == rate["ragged"] == 1
    assert rate["garbage"] < 0.15
    assert rate["flip-0"] == 0 < rate["flip-1"] < rate["flip-2"] < rate["flip-3"] < 1
    assert 0 < rate["eos-mid"] < 1
    assert 0 < rate["ngram"] < 1
    assert runs["none"].n_drafts == 0
    assert runs["none"].num_steps == plain.num_steps
    assert runs["oracle"].num_steps < plain.num_steps / 3


def test_siblings_differ() -> None:
    """n > 1: the same prompt and parameters under another seed is another sequence."""
    requests = [Request([1, 2], params(temperature=1.0, seed=seed), 20) for seed in range(4)]
    assert len({tuple(ids) for ids in Decoding(MODEL, requests).run(None, 0).output}) == 4


def test_resuming_gives_the_same_tokens(plain: Decoded) -> None:
    """A request that lost its worker is admitted again as prompt + emitted, and goes on alike."""
    for n, request in enumerate(_requests()):
        before, after = plain.output[n][:3], plain.output[n][3:]
        if after:
            resumed = request._replace(prompt=request.prompt + before, num_emitted=3)
            assert Decoding(MODEL, [resumed]).run(None, 0).output == [after], NAMES[n]
