"""Calls in sections: DeepSeek's formats and MiniMax's, and DeepSeek's reasoning."""

from __future__ import annotations

import json

import pytest
from support.clients.parser_cases import calls_of, contents_of, output_parser, parse
from surestep_gateway.parsers import Content, Reasoning, ToolArguments, coalesce

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, SEP, DONE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
V3 = f'{ONE}function{SEP}weather\n```json\n{{"city": "Paris", "days": 3}}\n```{DONE}'
V3_BOOK = f"{ONE}function{SEP}book\n```json\n{{}}\n```{DONE}"
V31 = f'{ONE}weather{SEP}{{"city": "Paris", "days": 3}}{DONE}'
V31_BOOK = f"{ONE}book{SEP}{{}}{DONE}"
DSML = (
    '<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
DSML_BOOK = '<｜DSML｜invoke name="book">\n</｜DSML｜invoke>'
M2 = DSML.replace("｜DSML｜", "").replace(' string="true"', "").replace(' string="false"', "")
STEP = (
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">\n'
    '<steptml:parameter name="city">Paris</steptml:parameter>\n'
    '<steptml:parameter name="days">3</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>'
)
STEP_BOOK = (
    '<｜tool_call_begin｜><steptml:invoke name="book"></steptml:invoke>\n<｜tool_call_end｜>'
)
CASES = {
    "deepseek_v3": (f"{BEGIN}{V3}\n{V3_BOOK}{END}", BEGIN, V3),
    "deepseek_v31": (f"{BEGIN}{V31}{V31_BOOK}{END}", BEGIN, V31),
    "deepseek_v32": (
        f"<｜DSML｜function_calls>\n{DSML}\n{DSML_BOOK}\n</｜DSML｜function_calls>",
        "<｜DSML｜function_calls>",
        DSML,
    ),
    "step3": (
        f"<｜tool_calls_begin｜>\n{STEP}\n{STEP_BOOK}\n<｜tool_calls_end｜>",
        "<｜tool_calls_begin｜>",
        STEP,
    ),
    "minimax_m2": (
        f"<minimax:tool_call>\n{M2}\n{DSML_BOOK.replace('｜DSML｜', '')}\n</minimax:tool_call>",
        "<minimax:tool_call>",
        M2,
    ),
}


@pytest.mark.parametrize("tools", CASES)
def test_calls_among_text(tools: str) -> None:
    events = parse(output_parser(tools), [f"Two:\n\n{CASES[tools][0]}\nThere."])
    found = [(name, json.loads(arguments)) for name, arguments in calls_of(events)]
    assert found == [("weather", {"city": "Paris", "days": 3}), ("book", {})]
    assert contents_of(events) == ["Two:", "\nThere."]


@pytest.mark.parametrize("tools", CASES)
def test_what_stands_in_a_section_and_is_no_call_is_content(tools: str) -> None:
    whole, begin, call = CASES[tools]
    text = whole.replace(call, f"{call} and ", 1)
    events = parse(output_parser(tools), [text])
    assert [name for name, _ in calls_of(events)] == ["weather", "book"]
    assert contents_of(events) == [" and"]
    other = call.replace("weather", "other")  # is none of the tools
    for alone in (f"The {begin} tag.", other, f"{begin}{call[:-40].split('weather')[0]}"):
        assert parse(output_parser(tools), [alone]) == [Content(alone)]


@pytest.mark.parametrize("tools", CASES)
def test_a_section_after_another(tools: str) -> None:
    whole = CASES[tools][0]
    events = parse(output_parser(tools), [f"{whole}so{whole}"])
    assert [name for name, _ in calls_of(events)] == ["weather", "book"] * 2
    assert contents_of(events) == ["so"]


def test_arguments_are_passed_on_while_they_are_written() -> None:
    parser = output_parser("deepseek_v31")
    parser.push(f'{BEGIN}{ONE}weather{SEP}{{"city": "Pa')
    assert coalesce(parser.push("ris")) == [ToolArguments(0, "ris")]
    tagged = output_parser("deepseek_v32")
    tagged.push(CASES["deepseek_v32"][0].split("ris<")[0])
    assert coalesce(tagged.push("ris")) == [ToolArguments(0, "ris")]


@pytest.mark.parametrize(
    ("attribute", "value", "found"),
    [
        ('string="true"', "3", "3"),
        ('string="false"', "3", 3),
        ('string="false"', '"a"', "a"),
        ('string="false"', '{"a": [1]}', {"a": [1]}),
        ('string="false"', "not JSON", "not JSON"),
        ("", "3", 3),  # by the schema
    ],
)
def test_the_attribute_says_what_a_value_is(attribute: str, value: str, found: object) -> None:
    text = CASES["deepseek_v32"][0].replace('string="false">3', f"{attribute}>{value}")
    assert json.loads(calls_of(parse(output_parser("deepseek_v32"), [text]))[0][1])["days"] == found


def test_an_unknown_attribute_is_content() -> None:
    text = CASES["deepseek_v32"][0].replace('string="true"', 'kind="x"')
    events = parse(output_parser("deepseek_v32"), [text])
    assert contents_of(events) == ['kind="x"']
    assert json.loads(calls_of(events)[0][1]) == {"city": "Paris", "days": 3}


@pytest.mark.parametrize("prompt", ["<｜Assistant｜>", "<｜Assistant｜><think>\n"])
@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_r1_always_reasons(prompt: str, opened: str) -> None:
    if prompt.endswith("\n") and opened:
        opened = ""
    parser = output_parser(None, reasoning="deepseek_r1", prompt=prompt)
    assert parser.reasoning
    assert parse(parser, [f"{opened}why\n</think>\n\nso"]) == [Reasoning("why"), Content("so")]
    cut = output_parser(None, reasoning="deepseek_r1", prompt=prompt)
    assert parse(cut, ["<thin"]) == [Reasoning("<thin")]


def test_v3_reasons_where_its_prompt_says_so() -> None:
    for prompt, expected in (
        ("<｜Assistant｜></think>", [Content("why</think>so")]),
        ("<｜Assistant｜>", [Content("why</think>so")]),
        ("<｜Assistant｜><think>", [Reasoning("why"), Content("so")]),
    ):
        parser = output_parser(None, reasoning="deepseek_v3", prompt=prompt)
        assert parse(parser, ["why</think>so"]) == expected
