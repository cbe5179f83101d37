"""Into which pieces a text is cut, by tokens, by speculation or by the network, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import tiny_tokenizer
from support.clients.parser_cases import (
    all_partitions,
    output_parser,
    parse,
    partitions,
    said,
    words,
)
from surestep_gateway.generation.detokenize import Detokenizer, StopScanner, TextAssembler
from surestep_gateway.parsers import (
    Event,
    Reasoning,
    ToolArguments,
    ToolCallStart,
    coalesce,
    content_of,
)
from surestep_gateway.text.tokenizer import Tokenizer

HERMES = [
    *("thought", "\n", "</think>", "\n\n", "look:", "\n<tool", "_call>", '\n{"name": "we'),
    *('ather", "arguments": ', '{"city": "é\\"}', '"}}', "\n</tool_call>"),
]
CODER = [
    *(
        "</think>",
        "<tool_call>",
        "\n<function=weather>",
        "\n<parameter",
        "=city>\n",
        "a\n",
        "</para",
    ),
    *("meter>\n<parameter=days>", "\n1", "2\n</parameter>", "\n</function>", "\n</tool_call>\n"),
]
GLM = [
    *("thought", "\n<tool", "_call>weather\n", "<arg_key>city</arg", "_key>\n<arg_"),
    *("value>a</arg", "_b>\n</arg_value>", "<arg_key>days</arg_key><arg_value>12</arg_value>"),
    *("</tool_call>", "</think>"),
]
SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
V3 = [
    *("</think>", "look:\n<｜tool▁calls", f"▁begin｜>{ONE[0]}function", f"{ONE[1]}weather"),
    *("\n```", 'json\n{"city": "`"}', f"\n```{ONE[2]}", f"\n{ONE[0]}function{ONE[1]}book\n"),
    *("```json\n{}\n```" + ONE[2] + SECTION[1], "so"),
]
V31 = [
    *("</think>", SECTION[0], f"{ONE[0]}weather<｜tool", '▁sep｜>{"days": ', f"2}}{ONE[2]}", "\n"),
    *(f"{ONE[0]}book{ONE[1]}{{}}{ONE[2]}", "and", SECTION[1], f"\n{ONE[0]}x{ONE[1]}{{}}"),
]
DSML = [
    *("</think>", "\n\n<｜DSML｜", 'function_calls>\n<｜DSML｜invoke name="', 'weather">'),
    *('\n<｜DSML｜parameter name="city" string="', 'true">a</', "｜DSML｜parameter>\n"),
    *('<｜DSML｜parameter name="days" string="false">2', "</｜DSML｜parameter>\n</｜DSML｜"),
    *("invoke>\n</｜DSML｜function_calls>", "so"),
]
MINIMAX = [
    piece.replace("｜DSML｜", "").replace("function_calls", "minimax:tool_call") for piece in DSML
]
LLAMA = [
    *("</think>", "\n", '{"na', 'me": "weather", "param', 'eters": {', '"city": "}"', "}}", ";"),
    *(
        ' {"name": "book", "arguments"',
        ": {}} ",
        '<|python_tag|>{"name": "book", "parameters": {}}',
    ),
]
MISTRAL = [
    *("</think>", "so", "[TOOL", '_CALLS]weather[ARGS]{"city": "', '}"}[TOOL_CALLS]', " [{"),
    *('"name": "book", "arguments": {}}', ", {", '"id": 1}]', "[TO", "DO]"),
]
XLAM = [
    *(
        "</think>",
        "a ```",
        "json\n[{",
        '"arguments": "{\\"ci',
        'ty\\": 1}"',
        ', "type": "function"',
    ),
    *(', "name": "weather"}', ",\n{", '"name": "book", "arguments": {}}', "]\n``", "`", "b"),
]
PYTHON = [
    *(
        "</think>",
        "\n[weat",
        'her(city="a\\',
        "u00e9'",
        '", days',
        "=-1",
        "_0)",
        ", book(",
        "guests=(",
    ),
    *("1, {'a'", ": True})", ")] [x", '{"na', 'me": "book", "parameters": {}}'),
]
OLMO = [
    *("</think>", "so\n<func", "tion_calls>\nwea", "ther(city='a", "', days=1)\nbo"),
    *("ok(guests=[null])\n</function", "_calls>", " x"),
]
PHI = [
    *("</think>", "so func", "tools", '[{"name": "wea', 'ther", "arguments": {"city": "]"', "}}"),
    *(', {"name": "book", ', '"arguments": {}}]', " functools.x"),
]
GRANITE = [
    *("Here is my th", "ought process:", " hm Here is", " my response:", "\n\nso <|tool"),
    *('_call|> [{"name": "weather", "arguments": {"city": "}"', "}}, {"),
    *('"name": "book", "arguments": {}}]', " x"),
]
HUNYUAN = [
    *("<think>", "\nhm\n</th", "ink>\n<answer", ">\n<tool_", 'calls>[{"name": '),
    *('"weather", "arguments": {"city": "]"}}', ", {", '"name": "book", "arguments": {}}]</tool'),
    *("_calls>", "\n</ans", "wer>\n"),
]
SEED = [
    *("<seed:thi", "nk>hm</seed", ":think>\n", "<seed:tool_call>\n<func", "tion=weather>\n"),
    *("<parameter=ci", "ty>a\n</para", "meter>\n<parameter=days>2</parameter>"),
    *("\n</function>\n</seed:tool", "_call>"),
]
KIMI_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_ONE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI = [
    *("hm", KIMI_SECTION[0][:9], f"{KIMI_SECTION[0][9:]}{KIMI_ONE[0]}functions.weather"),
    *(f":0{KIMI_ONE[1]}", '{"city": "a"}<|tool_call_end', f"|>{KIMI_ONE[0]}functions_book_1"),
    *(KIMI_ONE[1], '"{\\"guests\\": []}"', KIMI_ONE[2] + KIMI_SECTION[1], "so"),
]
STEP = [
    *("</think>", "so <｜tool_calls", "_begin｜>\n<｜tool_call_begin｜>func", "tion<｜tool_sep｜>"),
    *('<steptml:invoke name="weather">\n<steptml:para', 'meter name="city">a</steptml:parameter>'),
    *('<steptml:parameter name="days">2</steptml', ":parameter></steptml", ":invoke>"),
    *("<｜tool_call_end｜>\n<｜tool_calls", "_end｜>", "so"),
]
OUTPUTS = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "xlam": XLAM,
    "pythonic": PYTHON,
    "qwen3_coder": CODER,
    "glm45": GLM,
    "deepseek_v3": V3,
    "deepseek_v31": V31,
    "deepseek_v32": DSML,
    "minimax_m2": MINIMAX,
    "olmo3": OLMO,
    "phi4_mini_json": PHI,
    "granite": GRANITE,
    "hunyuan_a13b": HUNYUAN,
    "seed_oss": SEED,
    "kimi_k2": KIMI,
    "step3": STEP,
}
REASONING = {name: name for name in ("granite", "hunyuan_a13b", "seed_oss", "kimi_k2")} | {
    "mistral": "mistral",
    "glm45": "glm45",
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_v3",
    "minimax_m2": "minimax_m2",
}
CALL_ID = "[CALL_ID]"  # of Mistral
FALSE_STARTS = [
    "<think",
    ">a<",
    "/think",
    ">\n",
    "<tool_call>",
    "<",
    "tool_call>",
    "{",
    "<tool",
    "x ",
]


@pytest.mark.parametrize(
    ("tools", "tokens"), [*OUTPUTS.items(), *((tools, FALSE_STARTS) for tools in OUTPUTS)]
)
@pytest.mark.parametrize("prompt", ["<think>\n", ""])
@pytest.mark.rotates(2)
def test_every_partition_of_a_short_output(tools: str, tokens: list[str], prompt: str) -> None:
    def read(pieces: Sequence[str]) -> list[Event]:
        reasoning = REASONING.get(tools, "qwen3")
        return parse(output_parser(tools, reasoning=reasoning, prompt=prompt), pieces)

    expected = read(list("".join(tokens)))
    if tokens is not FALSE_STARTS:
        assert any(isinstance(event, ToolCallStart) for event in expected)
    assert all(read(pieces) == expected for pieces in all_partitions(tokens))


FRAGMENTS = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "\n",
            " ",
            "{",
            "}",
            '"',
            "\\",
            "<",
        ),
        *(
            '{"name": "weather", "arguments": ',
            '{"arguments": {}',
            ', "name": "weather"}',
            '{"a": "',
        ),
        *(
            "<function=weather>",
            "</function>",
            "<parameter=city>",
            "<parameter=days>",
            "</parameter>",
        ),
        *("é🙂", "12", "</", "tool_call>", "thought", " " * 700, "\n" * 700),
    ]
)
TEXTS = st.lists(FRAGMENTS, max_size=30)
BARE = ("[", "]", ", ", "```", "json", '{"name": "weather", "arguments": {', "}}", '{"a": {')
MARKUP = dict.fromkeys(("hermes", "qwen3_coder"), TEXTS) | {
    tools: st.lists(st.one_of(FRAGMENTS, st.sampled_from(markup)), max_size=30)
    for tools, markup in {
        "llama3_json": ("<|python_tag|>", '{"name": "weather", "parameters": {', "}}", ";"),
        "mistral": (*BARE, "[TOOL_CALLS]", "[ARGS]", CALL_ID, "weather", '{"a": "'),
        "xlam": (*BARE, '"arguments": "{', '\\"a\\": 1}"', '"name": "weather"'),
        "pythonic": (*BARE, "weather(", "city=", "'a", "'", '"""', "(1, [", "-2", "book()", "\\x4"),
        "glm45": ("<arg_key>city", "<arg_key>days", "</arg_key>", "<arg_value>", "</arg_value>"),
        "deepseek_v3": (*SECTION, *ONE, "weather\n", "```json", "```", "function"),
        "deepseek_v31": (*SECTION, *ONE, "weather", '{"city": "'),
        "deepseek_v32": tuple("".join(DSML[1:-1]).split("\n")),
        "minimax_m2": tuple("".join(MINIMAX[1:-1]).split("\n")),
        "step3": tuple("".join(STEP[1:]).replace("<", "\n<").split("\n")),
        "olmo3": (*BARE, "<function_calls>", "</function_calls>", "weather(", "city='a'", ")\n"),
        "phi4_mini_json": (*BARE, "functools", "<|tool_call|>", "<|/tool_call|>", "}}, "),
        "granite": (*BARE, "<|tool_call|>", "Here is my thought process:", "Here's my response:"),
        "hunyuan_a13b": (*BARE, "<tool_calls>", "</tool_calls>", "<answer>", "</answer>"),
        "seed_oss": ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        "kimi_k2": (*KIMI_SECTION, *KIMI_ONE, "functions.", "weather", ":0", '"{\\"a\\": 1}"'),
    }.items()
}
PARSERS = [
    *((tools, REASONING.get(tools, "qwen3")) for tools in MARKUP),
    *((tools, None) for tools in MARKUP),
]
PROMPTS = st.sampled_from(["<think>\n", "", "</think>\n\n"])


@pytest.mark.parametrize(("tools", "reasoning"), PARSERS)
@given(data=st.data(), cuts=st.lists(st.integers(1, 3000)), prompt=PROMPTS)
@pytest.mark.rotates(1)
def test_pieces_of_any_text(
    tools: str, reasoning: str | None, data: st.DataObject, cuts: list[int], prompt: str
) -> None:
    text = "".join(data.draw(MARKUP[tools]))
    edges = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    one = parse(output_parser(tools, reasoning=reasoning, prompt=prompt), [text])
    assert parse(output_parser(tools, reasoning=reasoning, prompt=prompt), pieces) == one
    assert parse(output_parser(tools, reasoning=reasoning, prompt=prompt), list(text)) == one


@pytest.mark.parametrize(("tools", "reasoning"), PARSERS)
@given(data=st.data(), prompt=PROMPTS)
@pytest.mark.rotates(1)
def test_no_text_is_lost(
    tools: str, reasoning: str | None, data: st.DataObject, prompt: str
) -> None:
    """Words put between the fragments all come out, once and in their order, but for what would be
    the id of a call: the server gives calls ids of its own."""
    fragments = [one for one in data.draw(MARKUP[tools]) if one != CALL_ID]
    text = "".join(f"{fragment}w{at}." for at, fragment in enumerate(fragments))
    events = parse(output_parser(tools, reasoning=reasoning, prompt=prompt), [text])
    assert words("".join(map(said, events))) == words(text)
    calls = [event.index for event in events if isinstance(event, ToolCallStart)]
    assert calls == list(range(len(calls)))
    assert coalesce(events) == events


@pytest.mark.parametrize("tools", MARKUP)
@given(data=st.data())
def test_text_without_calls_is_content_to_the_character(tools: str, data: st.DataObject) -> None:
    """Where no tool is named, or no marker of the format is there."""
    fragments = data.draw(MARKUP[tools])
    text = "".join(fragments).replace("weather", "lookup").replace("book", "look")
    if tools not in ("llama3_json", "xlam", "pythonic"):
        text = text.replace("<", "(").replace("[TOOL", "[TOO").replace("functools", "func")
    assert content_of(parse(output_parser(tools), [text])) == text


@pytest.fixture(scope="module")
def marked() -> Tokenizer:
    """A tokenizer whose markers are special tokens."""
    markers = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    return Tokenizer(tiny_tokenizer.build(*markers))


@given(cuts=st.lists(st.integers(1, 200)), special=st.booleans())
def test_partitions_of_tokens(marked: Tokenizer, cuts: list[int], special: bool) -> None:
    text = "the dog\n</think>\n\n" + "".join(HERMES[4:]) + "\n" + "".join(HERMES[5:])
    tokenizer = marked if special else Tokenizer(tiny_tokenizer.build())
    ids = tokenizer.encode_now(text, add_special_tokens=False)

    def read(runs: list[list[int]]) -> tuple[list[Event], int | None]:
        parser = output_parser("hermes", reasoning="qwen3")
        assembler = TextAssembler(
            Detokenizer(tokenizer, skip_special_tokens=True, shown=parser.markers),
            StopScanner(["}}}", "\n</end"], include_stop=False),
            parser,
            min_tokens=0,
            include_stop=False,
        )
        events: list[Event] = []
        for number, run in enumerate(runs, start=1):
            piece = assembler.push(run, ended=number == len(runs), stop_token=False)
            events += piece.events
        return coalesce(events), assembler.num_reasoning_tokens

    events, reasoning = read(list(partitions(ids, cuts)))
    assert (events, reasoning) == read([[token] for token in ids])
    assert events[0] == Reasoning("the dog")
    assert ToolArguments(1, '{"city": "é\\"}"}') in events
    if special:
        thought = tokenizer.encode_now("the dog\n", add_special_tokens=False)
        assert reasoning == len(thought)


@pytest.mark.parametrize(("tools", "reasoning"), PARSERS)
@pytest.mark.parametrize("space", [" ", "\n"])
@pytest.mark.parametrize("prompt", ["<think>\n", ""])
def test_white_space_without_an_end_is_not_kept(
    tools: str, reasoning: str | None, space: str, prompt: str
) -> None:
    """Text held back is looked at again with every token, so that it must not grow."""
    parser = output_parser(tools, reasoning=reasoning, prompt=prompt)
    sent = sum(
        len(getattr(event, "text", "")) for _ in range(50) for event in parser.push(space * 100)
    )
    skipped = reasoning is not None and space == "\n"  # newlines beside a marker are left out
    assert skipped or sent >= 5000 - 2048
