from __future__ import annotations

from support.fakes.scheduler import logprob_columns
from surestep_gateway.apis.openai.logprobs import (
    CompletionLogprobs,
    TextOfTokens,
    TokenSpeller,
    chat_logprobs,
    prompt_logprobs,
)
from surestep_gateway.generation.detokenize import Detokenizer
from surestep_gateway.generation.sequence import Position, TokenLogprob, positions
from surestep_gateway.text.tokenizer import Tokenizer


def test_columns_become_positions() -> None:
    assert positions(logprob_columns([7, 9], num_top=2)) == [
        Position(TokenLogprob(7, -0.5), 1, [TokenLogprob(7, -0.5), TokenLogprob(8, -1.5)]),
        Position(TokenLogprob(9, -0.5), 1, [TokenLogprob(9, -0.5), TokenLogprob(10, -1.5)]),
    ]
    assert positions(logprob_columns([7], num_top=0))[0].top == []


def test_infinity_becomes_a_number() -> None:
    columns = logprob_columns([7], num_top=1)
    columns.logprob[0] = columns.top_logprobs[0] = float("-inf")
    (position,) = positions(columns)
    assert position.chosen.logprob == position.top[0].logprob == -9999.0


def test_chat_shape_has_the_bytes_of_each_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_now("🙂", add_special_tokens=False)
    found = positions(logprob_columns(ids, num_top=0))
    content = chat_logprobs(found, TokenSpeller(tokenizer, as_ids=False))["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "🙂"
    shown = chat_logprobs(found, TokenSpeller(tokenizer, as_ids=True))["content"]
    assert [entry["token"] for entry in shown] == [f"token_id:{i}" for i in ids]


def test_completion_offsets_go_on_between_calls(tokenizer: Tokenizer) -> None:
    text = "a🙂 the dog"
    ids = tokenizer.encode_now(text, add_special_tokens=False)
    found = positions(logprob_columns(ids, num_top=0))

    def builder() -> CompletionLogprobs:
        speller = TokenSpeller(tokenizer, as_ids=False)
        text = Detokenizer(tokenizer, skip_special_tokens=True)
        return CompletionLogprobs(speller, TextOfTokens(text))

    whole = builder().build(found)["text_offset"]
    pieces = builder()
    assert [offset for one in found for offset in pieces.build([one])["text_offset"]] == whole
    assert whole[0] == 0
    assert whole == sorted(whole)
    assert text[whole[-1] :] == tokenizer.decode(ids[-1:], skip_special_tokens=True)


def test_the_chosen_token_is_always_among_the_top(tokenizer: Tokenizer) -> None:
    position = Position(TokenLogprob(40, -3.0), 9, [TokenLogprob(41, -0.5)])
    speller = TokenSpeller(tokenizer, as_ids=True)
    text = Detokenizer(tokenizer, skip_special_tokens=True)
    shape = CompletionLogprobs(speller, TextOfTokens(text))
    assert shape.build([40, position])["top_logprobs"] == [
        None,
        {"token_id:41": -0.5, "token_id:40": -3.0},
    ]
    assert prompt_logprobs([position], speller.text) == [
        {
            "40": {"logprob": -3.0, "rank": 9, "decoded_token": "token_id:40"},
            "41": {"logprob": -0.5, "rank": 1, "decoded_token": "token_id:41"},
        },
    ]
