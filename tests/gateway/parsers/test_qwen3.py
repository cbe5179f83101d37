from __future__ import annotations

import pytest
from support.clients.parser_cases import output_parser, parse
from surestep_gateway.parsers import Content, Reasoning, ToolCallStart

OPEN = "<|im_start|>assistant\n<think>\n"  # templates that begin the reasoning
PLAIN = "<|im_start|>assistant\n"  # templates that leave it to the model
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"  # enable_thinking = false
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("prompt", "text", "events"),
    [
        (OPEN, "I see.\n</think>\n\nYes.", [Reasoning("I see."), Content("Yes.")]),
        (PLAIN, "<think>\nI see.\n</think>\n\nYes.", [Reasoning("I see."), Content("Yes.")]),
        (PLAIN, "\n<think>a\n\nb</think>c\n", [Reasoning("a\n\nb"), Content("c\n")]),
        (PLAIN, "Yes.", [Content("Yes.")]),
        (PLAIN, "Use <think> and </think>.", [Content("Use <think> and </think>.")]),
        (CLOSED, "\nYes.", [Content("Yes.")]),
        (CLOSED, "<think>no</think>", [Content("<think>no</think>")]),
        (OPEN, "\n\n</think>\n\nYes.", [Content("Yes.")]),
        (OPEN, "a </think", [Reasoning("a </think")]),
        (OPEN, "a\n", [Reasoning("a\n")]),
        (OPEN, "a</think>", [Reasoning("a")]),
        (OPEN, "a</think>b</think>c", [Reasoning("a"), Content("b</think>c")]),
        (PLAIN, "<thi", [Content("<thi")]),
        (PLAIN, "<thin>", [Content("<thin>")]),
        (PLAIN, " \n", [Content(" \n")]),
        (OPEN, "", []),
        ("", "x", [Content("x")]),
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_reasoning_and_content(
    name: str, prompt: str, text: str, events: list[Reasoning | Content]
) -> None:
    if name == "mistral":
        prompt, text = of_mistral(prompt), of_mistral(text)
        events = [type(event)(of_mistral(event.text)) for event in events]
    assert parse(output_parser(reasoning=name, prompt=prompt), [text]) == events


NO_THOUGHT = "<think>\n\n</think>\n"
GRANITE = "Here is my thought process:", "Here is my response:"


@pytest.mark.parametrize(
    ("name", "prompt", "text", "events"),
    [
        ("granite", "", f"{GRANITE[0]} a\n\n{GRANITE[1]} b ", [Reasoning("a"), Content("b ")]),
        ("granite", "", "Here's my thought process: a", [Reasoning("a")]),
        ("granite", "", f"a {GRANITE[0]} b", [Content(f"a {GRANITE[0]} b")]),
        ("granite", "", "Here is my", [Content("Here is my")]),
        ("hunyuan_a13b", "", "<think>\na\n</think>\n<answer>\nb\n</answer>\n", "ab"),
        ("hunyuan_a13b", NO_THOUGHT, "<answer>\nb\n</answer>", [Content("b")]),
        ("hunyuan_a13b", NO_THOUGHT, "<answer>b</answer> c", [Content("b</answer> c")]),
        ("hunyuan_a13b", NO_THOUGHT, "<answer>b</answer></answer>", [Content("b</answer>")]),
        ("hunyuan_a13b", NO_THOUGHT, "b</answer>", [Content("b</answer>")]),
        ("hunyuan_a13b", NO_THOUGHT, "<answer", [Content("<answer")]),
        ("hunyuan_a13b", NO_THOUGHT, "<answer>b\n</ans", [Content("b\n</ans")]),
        ("ernie45", OPEN, "a\n</think>\n\n\n<response>\nb\n</response>\n", "ab"),
        ("ernie45", OPEN, "a\n</think>\nb", "ab"),
        ("seed_oss", "", "<seed:think>a</seed:think>b", "ab"),
        ("seed_oss", "<seed:think><seed:cot_budget_reflect>", "a</seed:think>b", "ab"),
        ("kimi_k2", PLAIN, "<think>a</think>b", "ab"),
        ("kimi_k2", "<think></think>", "b", [Content("b")]),
        *((name, PLAIN, "a</think>b", "ab") for name in ("olmo3", "nemotron_v3", "step3")),
    ],
)
def test_families_have_markers_of_their_own(
    name: str, prompt: str, text: str, events: list[Reasoning | Content] | str
) -> None:
    expected = [Reasoning("a"), Content("b")] if events == "ab" else events
    assert parse(output_parser(reasoning=name, prompt=prompt), [text]) == expected
    assert parse(output_parser(reasoning=name, prompt=prompt), list(text)) == expected


def of_mistral(text: str) -> str:
    """Between its own markers."""
    for begin, marked in (("<think>", "[THINK]"), ("</think", "[/THINK"), ("<thi", "[THI")):
        text = text.replace(begin, marked)
    return text.replace("THINK>", "THINK]")


def test_reasoning_never_calls() -> None:
    parser = output_parser("hermes", reasoning="qwen3", prompt=OPEN)
    events = parse(parser, [f"maybe {CALL} or\n</think>\n\n{CALL}"])
    assert events[0] == Reasoning(f"maybe {CALL} or")
    assert [event for event in events if isinstance(event, ToolCallStart)] == [
        ToolCallStart(0, "weather")
    ]


def test_whether_the_next_text_is_reasoning() -> None:
    parser = output_parser(reasoning="qwen3", prompt=PLAIN)
    seen = []
    for piece in ("<think>", "a", "</think>", "b"):
        parser.push(piece)
        seen.append(parser.reasoning)
    assert seen == [True, True, False, False]
