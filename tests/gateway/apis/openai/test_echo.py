"""Echoed prompts, with every kind of tokenizer: their text, and where each token stands in it."""

from __future__ import annotations

import pytest
from support.checkpoints.tokenizer_kinds import KINDS
from support.fakes.scheduler import default_info
from surestep_gateway.apis.openai.logprobs import CompletionLogprobs, TextOfClient, TokenSpeller
from surestep_gateway.request.prepared import completion_prompt
from surestep_gateway.request.protocol import CompletionRequest
from surestep_gateway.text.tokenizer import Tokenizer

INFO = default_info(vocab_size=1000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("add_special_tokens", [False, True])
@pytest.mark.parametrize("text", ["the dog", "the<|im_end|>dog", "<s>the dog sleeps", "s"])
def test_text_and_offsets(kind: str, add_special_tokens: bool, text: str) -> None:
    tokenizer = Tokenizer(KINDS[kind]())
    ids = tokenizer.encode_now(text, add_special_tokens=add_special_tokens)
    request = CompletionRequest(prompt=text, echo=True)
    prompt = completion_prompt(ids, text, request, tokenizer, INFO)
    assert prompt.text == text
    speller = TokenSpeller(tokenizer, as_ids=False)
    builder = CompletionLogprobs(speller, TextOfClient(prompt.text, tokenizer))
    offsets = builder.build(ids)["text_offset"]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(text)
    added = len(ids) - len(tokenizer.encode_now(text, add_special_tokens=False))
    wrong = [
        token
        for token, at in zip(map(tokenizer.piece, ids), offsets, strict=True)
        if not text[at:].startswith((token.decode(), token.decode().lstrip()))
    ]
    assert len(wrong) <= added  # special tokens that the tokenizer put around it
    assert all(token.decode() in ("<s>", "</s>") for token in wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_echoed_with_their_special_tokens(kind: str) -> None:
    tokenizer = Tokenizer(KINDS[kind]())
    ids = tokenizer.encode_now("<|im_start|>the dog<|im_end|>", add_special_tokens=False)
    request = CompletionRequest(prompt=ids, echo=True)
    prompt = completion_prompt(ids, None, request, tokenizer, INFO)
    assert prompt.text == tokenizer.decode(ids, skip_special_tokens=False)
    assert prompt.text.startswith("<|im_start|>")
    assert prompt.text.endswith("<|im_end|>")
