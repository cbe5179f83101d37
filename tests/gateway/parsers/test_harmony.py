"""Outputs in Harmony: what is reasoning, what is content and what is a call."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from support.clients.harmony_cases import PROMPT, ids_of, read, split, tokenizer
from support.references.harmony import Library, events_of, outputs, recorded
from surestep_gateway.parsers import (
    Content,
    Event,
    Reasoning,
    ToolArguments,
    ToolCallEnd,
    ToolCallStart,
)
from surestep_gateway.parsers.harmony import MAX_HEADER, HarmonyParser, read_header


def call(arguments: str, name: str = "weather", index: int = 0) -> list[Event]:
    text = [ToolArguments(index, arguments)] if arguments else []
    return [ToolCallStart(index, name), *text, ToolCallEnd(index)]


THOUGHT = "<|channel|>analysis<|message|>hm<|end|>"
START = "<|start|>assistant"


def test_what_openais_library_finds() -> None:
    """Also stray tokens within a text, which both take literally."""
    cases = recorded()
    assert len(cases) == 60
    for parts, messages in cases:
        assert read(ids_of(parts)).events == events_of(messages), parts


def test_what_openais_library_finds_here() -> None:
    """The same and more, where the library and its vocabulary are installed."""
    pytest.importorskip("openai_harmony")
    try:
        library = Library()
    except Exception as error:  # noqa: BLE001  # the library's own, and it has no other for this
        pytest.skip(f"no vocabulary: {error}")
    for parts in outputs(seed=2, count=400):
        assert read(ids_of(parts)).events == events_of(library.messages(parts)), parts


def test_reasoning_and_answer() -> None:
    found = read(f"{THOUGHT}{START}<|channel|>final<|message|>Yes é🙂.<|return|>")
    assert found.events == [Reasoning("hm"), Content("Yes é🙂.")]
    assert found.reasoning_tokens == len(ids_of(["hm"]))


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.weather <|constrain|>json",
        "<|channel|>commentary to=functions.weather<|constrain|>json",
        "<|channel|>commentary to=functions.weather json",
        "<|channel|>commentaryto=functions.weather",
        "<|channel|>commentary functions.weather",
        "<|channel|>analysis to=functions.weather code",
        "<|channel|>final to=weather",
        " to=functions.weather<|channel|>commentary json",
        " to=functions.weather<|channel|>",
        " to=functions.weather",
        " to=weather <|constrain|>json",
        "<|start|>assistant to=functions.weather",
    ],
)
def test_where_a_recipient_may_stand(header: str) -> None:
    assert read(f'{header}<|message|>{{"a": 1}}<|call|>').events == call('{"a": 1}')


@pytest.mark.parametrize(
    ("recipient", "name"),
    [
        ("functions.other", "other"),  # not among the tools: the client says so
        ("functions.mcp.search", "mcp.search"),
        ("other", "other"),
        ("python", None),
        ("browser.search", None),
        ("assistant", None),
        ("functions.", None),
        ("functions.a\0", None),
    ],
)
def test_whom_a_message_may_be_for(recipient: str, name: str | None) -> None:
    output = f"<|channel|>commentary to={recipient}<|message|>x<|call|>"
    assert read(output).events == (call("x", name) if name else [Content("x")])
    thought = output.replace("commentary", "analysis")
    assert read(thought).events == (call("x", name) if name else [Reasoning("x")])


def test_a_tool_that_is_called_like_a_built_in_one() -> None:
    output = "<|channel|>analysis to=python<|message|>1+1<|call|>"
    assert read(output, tools=["python"]).events == call("1+1", "python")


def test_calls_that_are_not_allowed_are_text() -> None:
    output = f"{THOUGHT}{START} to=functions.weather<|channel|>commentary<|message|>{{}}<|call|>"
    assert read(output, tools=[]).events == [Reasoning("hm"), Content("{}")]


def test_several_messages() -> None:
    output = (
        f"{THOUGHT}{START}<|channel|>commentary<|message|>I look.<|end|>"
        f"{START} to=functions.weather<|channel|>commentary json<|message|>{{}}<|end|>"
        f"{START}<|channel|>analysis<|message|>more<|end|>"
        f"{START} to=functions.book<|channel|>commentary json<|message|><|end|>"
        f"{START}<|channel|>final<|message|>Done.<|return|>"
    )
    assert read(output).events == [
        Reasoning("hm"),
        Content("I look."),
        *call("{}"),
        Reasoning("\nmore"),
        *call("{}", "book", 1),
        Content("\nDone."),
    ]


@pytest.mark.parametrize(
    ("output", "events"),
    [
        ("Hello.<|return|>", [Content("Hello.")]),
        ("Hello, this is an answer without any channel", [Content("Hello, this is an answer without any channel")]),
        ("<|message|>Hello.<|return|>", [Content("Hello.")]),
        ("<|channel|><|message|>Hello.", [Content("Hello.")]),
        ("<|channel|>thought<|message|>Hello.", [Content("Hello.")]),
        ("<|channel|>thought json<|message|>Hello.", [Content("Hello.")]),
        ("<|channel|>analysis We think<|end|>", [Reasoning("We think")]),
        ("<|channel|>thought Hello<|end|>", [Content("thought Hello")]),
        ("<|channel|>final a b c<|message|>d", [Content("a b cd")]),
        ("Hello there<|channel|>final<|message|>x", [Content("Hello there\nx")]),
        ("Hello <|message|>x", [Content("Hello x")]),
        (f"{THOUGHT}<|start|>bot<|channel|>final<|message|>x", [Reasoning("hm"), Content("x")]),
        ("<|end|><|end|><|return|>", []),
        ("", []),
        (f"{THOUGHT}assistant<|channel|>final<|message|>x", [Reasoning("hm"), Content("x")]),
        (f"{THOUGHT}<|channel|>final<|message|>x", [Reasoning("hm"), Content("x")]),
        (f"{THOUGHT}x", [Reasoning("hm"), Content("x")]),
        ("<|channel|>analysis<|channel|>final<|message|>x", [Content("x")]),
        ("<|start|><|start|>assistant<|channel|>final<|message|>x", [Content("x")]),
        ("<|start|>user<|message|>x<|end|>", [Content("x")]),
        # No end of the message before:
        ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>x", [Reasoning("hm"), Content("x")]),
        (f"<|channel|>analysis<|message|>hm{START}<|channel|>final<|message|>x", [Reasoning("hm"), Content("x")]),
        (f" to=functions.book<|message|>{{}}{START}<|channel|>final<|message|>x", [*call("{}", "book"), Content("x")]),
    ],
)  # fmt: skip
def test_what_models_get_wrong(output: str, events: list[Event]) -> None:
    assert read(output).events == events


@pytest.mark.parametrize("mark", ["<|channel|>", "<|start|>", "<|message|>", "<|constrain|>"])
def test_special_tokens_within_arguments(mark: str) -> None:
    """They end nothing: what follows is no header."""
    output = f'<|channel|>commentary to=functions.weather<|message|>{{"a": "{mark}x"}}<|call|>'
    assert read(output).events == call(f'{{"a": "{mark}x"}}')


def test_text_that_is_spelled_like_special_tokens() -> None:
    text = "<|end|><|start|>assistant<|channel|>final<|message|>x"
    output = [*ids_of(split("<|channel|>analysis<|message|>")), *spelled(text)]
    assert read(output).events == [Reasoning(text)]


def spelled(text: str) -> list[int]:
    """Ids of text that are nobody's markers."""
    return [id_ for char in text for id_ in ids_of([char])]


FULL = f"{THOUGHT}{START}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"


@pytest.mark.parametrize("seen", range(len(ids_of(split(FULL))) + 1))
def test_cut_off_in_a_header(seen: int) -> None:
    """A header that the output ends in is no text, wherever that is."""
    events = read(ids_of(split(FULL))[:seen]).events
    assert not any(isinstance(event, Content) for event in events)


def test_cut_off_in_a_call() -> None:
    events = read('<|channel|>commentary to=functions.weather<|message|>{"city": "Os').events
    assert events == call('{"city": "Os')
    assert read("<|channel|>commentary to=functions.weather<|message|>").events == call("")


def test_characters_cut_by_a_special_token() -> None:
    smile = ids_of(["🙂"])
    assert len(smile) > 1
    parts = [*ids_of(split("<|channel|>analysis<|message|>a")), *smile[:-1]]
    rest = ids_of(split(f"<|end|>{START}<|channel|>final<|message|>é"))
    assert read([*parts, *rest]).events == [Reasoning("a\ufffd"), Content("é")]


@pytest.mark.parametrize(
    "begin", ["<|channel|>final", "<|channel|>", " to=functions.", "", "<|start|>"]
)
@pytest.mark.parametrize("word", ["ab", "ab ", "to=", "<"])
def test_a_header_without_an_end(begin: str, word: str) -> None:
    """It is text before it is long, and costs no more than text does."""
    parser = HarmonyParser(PROMPT + begin, ["weather"])
    piece = word * 16
    pushes = (1 << 20) // len(piece)
    started = time.process_time()
    events = [event for _ in range(pushes) for event in parser.push(piece)]
    assert time.process_time() - started < 10, "a megabyte"
    text = "".join(event.text for event in events if isinstance(event, Content))
    assert len(text) + MAX_HEADER >= len(piece) * pushes
    assert parser.finish() == []


@pytest.mark.parametrize("type_", ["json", "code"])
def test_cut_off_behind_a_content_type(type_: str) -> None:
    assert read(f"<|channel|>commentary to=functions.weather {type_}").events == []
    assert read(f"<|channel|>final {type_}").events == []


@pytest.mark.parametrize(
    ("prompt", "output", "events"),
    [
        (PROMPT + "<|channel|>final<|message|>", "x<|return|>", [Content("x")]),
        (PROMPT + "<|channel|>analysis<|message|>so", "x<|end|>", [Reasoning("x")]),
        (PROMPT + "<|channel|>analysis", "<|message|>x<|end|>", [Reasoning("x")]),
        (PROMPT + " to=functions.book<|message|>", "{}<|call|>", [ToolArguments(0, "{}"), ToolCallEnd(0)]),
        ("<|start|>user<|message|>hello<|end|>", f"{START}<|channel|>final<|message|>x", [Content("x")]),
        ("any other template", "x", [Content("x")]),
        ("", "<|channel|>final<|message|>x", [Content("x")]),
    ],
)  # fmt: skip
def test_where_the_prompt_ends(prompt: str, output: str, events: list[Event]) -> None:
    assert read(output, prompt=prompt).events == events


def test_stop_strings_and_special_tokens() -> None:
    """They are looked for in each text by itself, and neither in headers nor across them."""
    output = f"{THOUGHT}{START}<|channel|>final<|message|>one two<|return|>"
    for stop in ("final", "assistant", "hmone", "mone", "<|end|>", "<|channel|>"):
        found = read(output, stops=[stop])
        assert (found.stop, found.events) == (None, [Reasoning("hm"), Content("one two")])
    found = read(output, stops=["e tw", "hmm"])
    assert (found.stop, found.events) == ("e tw", [Reasoning("hm"), Content("on")])
    found = read(output, stops=["m"])
    assert (found.stop, found.events) == ("m", [Reasoning("h")])
    assert found.num_tokens == len(ids_of(split("<|channel|>analysis<|message|>hm")))


@pytest.mark.parametrize(
    "output",
    [
        "Hello, this is an answer without any channel, whose words go on",
        "Hello there, to be short.<|return|>",
        "<|channel|>analysis We think of this<|end|>",
        "<|channel|>final a b c<|message|>and so on<|return|>",
        "<|channel|>final<|message|>left<|channel|>right, and no header at all<|return|>",
        "<|channel|>final<|message|>say <|constrain|>json and <|message|>x<|return|>",
        "to=" * (MAX_HEADER // 3 + 4),
    ],
)
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.rotates(1)
def test_stop_strings_in_what_looked_like_a_header(output: str, include: bool) -> None:
    """The output ends with the token that completes them, or says that it is text."""
    ids = ids_of(split(output))
    (told,) = read(ids).events
    assert isinstance(told, Content | Reasoning)
    told_by = [texts(ids[:number], ended=number == len(ids)) for number in range(len(ids) + 1)]
    places = [*range(min(len(told.text), 60)), *range(max(60, len(told.text) - 9), len(told.text))]
    for stop in {told.text[at : at + length] for at in places for length in (1, 4, 9)}:
        first, border = told.text.index(stop), told.text.find("<|channel|>")
        if first < border < first + len(stop):
            continue  # a token that may begin a header ends a text
        ends = first + len(stop) * include
        found = read(ids, stops=[stop], include_stop=include)
        assert found.stop == stop
        assert found.events == ([replace(told, text=told.text[:ends])] if ends else [])
        assert found.num_tokens == next(n for n, text in enumerate(told_by) if stop in text)
        assert read(ids, runs=[ids], stops=[stop], include_stop=include) == found


def texts(ids: list[int], *, ended: bool) -> str:
    return "".join(
        one.text for one in read(ids, ended=ended).events if isinstance(one, Content | Reasoning)
    )


@pytest.mark.parametrize("end", ["", " and so on, and so on, and so on"])
def test_held_text_waits_for_min_tokens_too(end: str) -> None:
    early = len(ids_of(["Say one"]))
    found = read(f"Say one, one more{end}", stops=["one", "Say"], min_tokens=early)
    assert (found.stop, found.events) == ("one", [Content("Say one, ")])


def test_stop_strings_wait_for_min_tokens() -> None:
    output = "<|channel|>final<|message|>one one<|return|>"
    header = len(ids_of(split("<|channel|>final<|message|>")))
    found = read(output, stops=["one"], min_tokens=header + len(ids_of(["one"])))
    assert (found.stop, found.events) == ("one", [Content("one ")])


def test_a_header_read_word_by_word() -> None:
    parsed = read_header("<|start|>assistant to=functions.a<|channel|>commentary <|constrain|>json")
    assert parsed == ("commentary", "functions.a", "")
    assert read_header("functions.a to=assistant<|channel|>commentary").recipient == "assistant"
    assert read_header("username is it") == (None, None, "username is it")
    assert tokenizer().id("<|call|>") is not None
