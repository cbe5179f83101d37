"""Tokenizers and chat templates read here, without transformers, against transformers itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.checkpoints import tiny_tokenizer, tokenizer_kinds
from support.checkpoints.published import published_template
from support.clients.parser_cases import calls_of, output_parser, parse
from surestep_common.config import cache_dir
from surestep_common.gguf import model_folder
from surestep_gateway.text.chat_template import ChatTemplate
from surestep_gateway.text.tokenizer import Texts, Tokenizer
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

HYBRID = Path(__file__).resolve().parents[2] / "data" / "tiny-hybrid"
DEFAULT = cache_dir() / "models" / "SmolLM2-135M-Instruct.gguf"

# What Hugging Face's dialect of Jinja has and plain Jinja has not.
DIALECT = """{%- set ns = namespace(n=0) %}
{% if tools %}
    {{ tools | tojson(indent=2) }}
{% endif %}
{% for message in messages %}
    {% if message.role == "tool" %}{% continue %}{% endif %}
{{ bos_token }}{{ message.role }}: {{ message.content | trim }}
    {% generation %}
  {{ [message.content, message.tool_calls or 0] | tojson }}
    {% endgeneration %}
    {% set ns.n = ns.n + 1 %}
{% endfor %}
{{ ns.n }}{{ strftime_now("%Y")[:2] }}{{ eos_token }}{% if add_generation_prompt %}go{% endif %}
"""


def of_kind(kind: str) -> Callable[[Path], Path]:
    """Writes a checkpoint's text side with a tokenizer of tokenizer_kinds."""

    def write(folder: Path) -> Path:
        folder.mkdir()
        tokenizer_kinds.KINDS[kind]().save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "chat_template": DIALECT,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    return write


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "tiny": tiny_tokenizer.save,
    "thinking": lambda folder: tiny_tokenizer.save(
        folder, "<think>", template=tiny_tokenizer.THINKING_TEMPLATE
    ),
    "tiny-hybrid": lambda folder: HYBRID,
    "default": lambda folder: model_folder(DEFAULT),
} | {kind: of_kind(kind) for kind in tokenizer_kinds.KINDS}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "default" and not DEFAULT.is_file():
        pytest.skip("the default model is not on this machine")
    return CHECKPOINTS[request.param](tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


MARKERS = ("<s>", "</s>", "<think>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "\u2581")
STRINGS = st.lists(
    st.text(max_size=30)
    | st.sampled_from(
        (*MARKERS, "the quick brown", " 12  345 ", "Grüße , n't .", "\n\n", "\U0001f642")
    ),
    max_size=8,
).map("".join)
MANY = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)


@MANY
@given(text=STRINGS, special=st.booleans())
def test_texts_become_the_same_ids(ours: Tokenizer, theirs: Any, text: str, special: bool) -> None:
    text = text.encode("utf-8", "ignore").decode()
    (ids,) = ours.encode(Texts([text], add_special_tokens=special))
    assert ids == theirs(text, add_special_tokens=special)["input_ids"]
    assert ids == ours.encode_now(text, add_special_tokens=special)


@MANY
@given(data=st.data(), skip=st.booleans())
def test_ids_become_the_same_text(
    ours: Tokenizer, theirs: Any, data: st.DataObject, skip: bool
) -> None:
    text = data.draw(STRINGS).encode("utf-8", "ignore").decode()
    drawn = data.draw(st.lists(st.integers(0, ours.size - 1), max_size=5))
    ids = ours.encode_now(text, add_special_tokens=False) + drawn
    expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assume("\ufffd" not in expected)  # of invalid bytes, each makes its own number of these
    assert ours.decode(ids, skip_special_tokens=skip) == expected


def test_the_same_tokens_are_special(ours: Tokenizer, theirs: Any) -> None:
    theirs_special = {i for i, t in theirs.added_tokens_decoder.items() if t.special}
    assert ours.special_ids == theirs_special


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "ü"]}}}
CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": " Be <brief>. "}, {"role": "user", "content": "ünï \n\n'&\""}],
    [
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "again"},
    ],
)
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_become_the_same_text(
    folder: Path, theirs: Any, chat: list[dict[str, Any]], tools: list[Any] | None, prompt: bool
) -> None:
    template = ChatTemplate.load(folder)
    text = theirs.apply_chat_template(
        chat, tools=tools, add_generation_prompt=prompt, tokenize=False
    )
    assert template.render(chat, tools=tools, add_generation_prompt=prompt) == text


PUBLISHED = {  # templates, by the parsers of what they show
    "granite3-dense:2b": "granite",
    "granite3.1-moe:1b": "granite",
    "granite3.2:8b": "granite",
    "granite3.3:2b": "granite",
    "granite4:latest": "granite4",
    "qwen3-coder:30b": "qwen3_coder",
}


@pytest.mark.timeout(300)  # a package is fetched the first time
@pytest.mark.parametrize("model", PUBLISHED)
def test_published_templates_show_calls_that_parsers_read(model: str) -> None:
    """Transformers shows the same. Templates of Granite 3 show what the model said."""
    source, parser = published_template(model), PUBLISHED[model]
    user, called, result, *_ = CHATS[2]
    if parser == "granite":
        said = json.dumps([CALL["function"]], ensure_ascii=False)
        called = {"role": "assistant", "content": f"<|tool_call|>{said}"}
    chat = [user, called, result]
    tokens: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = render_jinja_template([chat], tools=[TOOL], chat_template=source, **tokens)[0]
    text = ChatTemplate(source, tokens).render(chat, tools=[TOOL], add_generation_prompt=False)
    assert text == theirs[0]
    schemas = {"f": {"properties": {"a": {"type": "array"}}}}
    events = parse(output_parser(parser, tools_of=schemas), [text.partition("and?")[2]])
    assert calls_of(events) == [("f", '{"a": [1, "ü"]}')]
