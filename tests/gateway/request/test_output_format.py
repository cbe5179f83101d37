"""Parsers that a chat template tells: those that read calls as it writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.checkpoints.published import published_template, published_tokenizer
from surestep_common.errors import InvalidRequest
from surestep_gateway.grammars.call_formats import FORMATS, parser_of
from surestep_gateway.parsers import TOOL_PARSERS, OutputParser, ToolArguments, ToolCallStart
from surestep_gateway.request.output_format import with_output_format
from surestep_gateway.settings.config import GatewaySettings
from surestep_gateway.text.chat_template import ChatTemplate
from surestep_gateway.text.service import TextProcessor
from surestep_gateway.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(300)  # packages are fetched the first time

NAME, ARGUMENTS = "weather", {"city": "Oslo"}
TOOL = {
    "name": NAME,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
PUBLISHED = {
    "cogito:14b": "hermes",
    "deepseek-r1:8b": "deepseek_v3",
    "deepseek-v3.1:latest": "deepseek_v31",
    "granite4:350m": "hermes",
    "llama3.2-vision:latest": "llama3_json",
    "qwen2.5-coder:1.5b": "hermes",
    "qwen3-coder:30b": "qwen3_coder",
    "qwen3:0.6b": "hermes",
    "r1-1776:671b": "deepseek_v3",
}
SILENT = "gemma3:1b", "glm4:9b", "mistral:7b-instruct-fp16", "phi4-mini:3.8b", "smollm2:135m"


def told(template: str, **given: Any) -> GatewaySettings:
    folder = published_tokenizer("qwen3")
    settings = GatewaySettings.model_validate({"model": folder} | given)
    words = {"bos_token": "<s>", "eos_token": "</s>"}
    processor = TextProcessor(
        settings=settings,
        tokenizer=Tokenizer.load(folder),
        template=ChatTemplate(template, words),
    )
    return with_output_format(settings, processor)


def read_back(parser: str, template: str) -> list[tuple[str, Any]]:
    """The calls that a parser reads in what a template writes."""
    call = {"name": NAME, "arguments": ARGUMENTS}
    whole = ChatTemplate(template, {}).with_call(
        {"type": "function", "function": TOOL},
        {"type": "function", "id": "call00000", "function": call},
    )
    text = whole.partition("question")[2].partition("result")[0]
    output = OutputParser(None, TOOL_PARSERS.get(parser)({NAME: TOOL["parameters"]}))
    events = [*output.push(text), *output.finish()]
    arguments = "".join(event.text for event in events if isinstance(event, ToolArguments))
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    return [(name, json.loads(arguments)) for name in names]


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.rotates(1)
def test_published_templates_show_the_format_of_calls(model: str) -> None:
    template = published_template(model)
    settings = told(template)
    assert (settings.tool_call_parser, settings.enable_auto_tool_choice) == (PUBLISHED[model], True)
    assert read_back(PUBLISHED[model], template) == [(NAME, ARGUMENTS)]


@pytest.mark.parametrize("model", SILENT)
@pytest.mark.rotates(1)
def test_some_show_none(model: str) -> None:
    """Then tools are refused, as before, until the operator names a parser."""
    template = published_template(model)
    assert told(template).tool_call_parser is None
    with pytest.raises(InvalidRequest, match="needs --tool-call-parser") as error:
        told(template, enable_auto_tool_choice=True)
    assert error.value.param == "enable_auto_tool_choice"


def test_what_the_operator_names_stands() -> None:
    settings = told(published_template("qwen3-coder:30b"), tool_call_parser="hermes")
    assert (settings.tool_call_parser, settings.enable_auto_tool_choice) == ("hermes", False)


def test_a_template_without_an_end_tells_nothing() -> None:
    endless = "{% if tools %}{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}"
    assert told(endless + "{% endfor %}{% endif %}").tool_call_parser is None


@pytest.mark.parametrize(
    ("text", "parser"),
    [
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]', "mistral"),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', "mistral"),
        ('[{"name": "weather", "arguments": {"city": "Oslo"}}]', "xlam"),
        ('[weather(city="Oslo")]', "pythonic"),
        ('<|tool_call|> [{"name": "weather", "arguments": {"city": "Oslo"}}]', "granite"),
        ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>", "glm45"),
        ("<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>", "glm47"),
        (
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
                '<|tool_call_argument_begin|>{"city": "Oslo"}'
            ),
            "kimi_k2",
        ),
        ('{"name": "weather", "arguments": {"city": "Oslo"}}', None),
    ],
)
def test_the_longest_match_is_the_format(text: str, parser: str | None) -> None:
    assert parser_of(f"user: weather? {text} result", NAME, "city", "Oslo") == parser
    assert parser is None or parser in FORMATS
