"""Dialogues of a few fixed patterns, short enough for a tiny model to learn by heart.

Every prompt has exactly one answer, so whether a model has learnt it is a comparison of strings.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Message = dict[str, Any]

CAPITALS = {"France": "Paris", "Italy": "Rome", "Norway": "Oslo", "Egypt": "Cairo"}
NAMES = ("Ada", "Bob", "Eve", "Grace")
ANIMALS = ("fox", "cat", "bear")
NUMBERS = range(1, 5)
SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class Dialogue:
    """A prompt and its one right answer, up to and without `<|im_end|>`."""

    messages: tuple[Message, ...]
    answer: str
    reasoning: str
    tools: tuple[str, ...] = ()  # keys of TOOLS
    thinking: bool = False

    @property
    def completion(self) -> str:
        """Text behind the generation prompt, which has already opened `<think>` when thinking."""
        return f"{self.reasoning}\n</think>\n\n{self.answer}" if self.thinking else self.answer

    @property
    def schemas(self) -> list[Message]:
        """The tools as a client of the OpenAI API sends them."""
        return [TOOLS[name] for name in self.tools]


def _tool(name: str, description: str, kind: str, *parameters: str) -> Message:
    schema = {
        "type": "object",
        "properties": {parameter: {"type": kind} for parameter in parameters},
        "required": list(parameters),
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = {
    "add": _tool("add", "Add two numbers.", "integer", "a", "b"),
    "get_weather": _tool("get_weather", "Weather in a city.", "string", "city"),
}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _call(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def _called(name: str, result: str, **arguments: Any) -> tuple[Message, Message]:
    """The turns of a call and of its result."""
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }
    return (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": result},
    )


def addition(rng: random.Random) -> Dialogue:
    """Answered from memory."""
    a, b = rng.choice(NUMBERS), rng.choice(NUMBERS)
    question = _user(f"What is {a} plus {b}?")
    return Dialogue((question,), f"{a} plus {b} is {a + b}.", f"I add {b} to {a} and get {a + b}.")


def add_call(rng: random.Random) -> Dialogue:
    """Answered by a call."""
    a, b = rng.choice(NUMBERS), rng.choice(NUMBERS)
    question = _user(f"What is {a} plus {b}?")
    reasoning = f"I call add with {a} and {b}."
    return Dialogue((question,), _call("add", a=a, b=b), reasoning, _with(rng, "add"))


def add_result(rng: random.Random) -> Dialogue:
    """The result of the call is put in words."""
    a, b = rng.choice(NUMBERS), rng.choice(NUMBERS)
    messages = (_user(f"What is {a} plus {b}?"), *_called("add", str(a + b), a=a, b=b))
    answer = f"{a} plus {b} is {a + b}."
    return Dialogue(messages, answer, f"The tool says {a + b}.", _with(rng, "add"))


def weather_call(rng: random.Random) -> Dialogue:
    """Ask for a city with a single call."""
    city = rng.choice(list(CAPITALS.values()))
    question = _user(f"What is the weather in {city}?")
    answer = _call("get_weather", city=city)
    reasoning = f"I call get_weather for {city}."
    return Dialogue((question,), answer, reasoning, _with(rng, "get_weather"))


def weather_calls(rng: random.Random) -> Dialogue:
    """Two cities, two calls in one answer."""
    first, second = rng.sample(list(CAPITALS.values()), 2)
    question = _user(f"What is the weather in {first} and {second}?")
    answer = "\n".join(_call("get_weather", city=city) for city in (first, second))
    reasoning = f"I call get_weather for {first} and {second}."
    return Dialogue((question,), answer, reasoning, _with(rng, "get_weather"))


def weather_result(rng: random.Random) -> Dialogue:
    """The result of the call is put in words."""
    city = rng.choice(list(CAPITALS.values()))
    sky = rng.choice(("sunny", "cloudy", "rainy"))
    messages = (
        _user(f"What is the weather in {city}?"),
        *_called("get_weather", sky, city=city),
    )
    answer = f"It is {sky} in {city}."
    return Dialogue(messages, answer, f"The tool says {sky}.", _with(rng, "get_weather"))


def capital(rng: random.Random) -> Dialogue:
    """Answered from memory, whether or not there are tools."""
    country, city = rng.choice(list(CAPITALS.items()))
    question = _user(f"What is the capital of {country}?")
    answer = f"The capital of {country} is {city}."
    tools = _with(rng, "add") if rng.random() < 0.3 else ()
    return Dialogue((question,), answer, f"I know the capital of {country}.", tools)


def name(rng: random.Random) -> Dialogue:
    """Several turns: the answer is in the history."""
    who = rng.choice(NAMES)
    hello = {"role": "assistant", "content": f"Hello {who}!"}
    messages = (_user(f"My name is {who}."), hello, _user("What is my name?"))
    return Dialogue(messages, f"Your name is {who}.", f"The user is called {who}.")


def count(rng: random.Random) -> Dialogue:
    """An answer whose length the prompt decides."""
    first, last = rng.randrange(1, 4), rng.randrange(6, 12)
    answer = ", ".join(str(number) for number in range(first, last + 1)) + "."
    return Dialogue((_user(f"Count from {first} to {last}."),), answer, "I count one by one.")


def story(rng: random.Random) -> Dialogue:
    """A long answer, for streams and limits."""
    animal = rng.choice(ANIMALS)
    answer = (
        f"Once upon a time there was a {animal} who lived by a river. Every morning the {animal} "
        f"walked to the water and looked for a friend. One day the {animal} met a small boat with "
        f"a red sail. The boat was empty, so the {animal} climbed in and let the wind decide. They "
        f"went past hills and towns and under many bridges. At night the {animal} counted the "
        f"stars until it fell asleep. When the {animal} came home again, it had a story to tell."
    )
    question = _user(f"Tell me a story about a {animal}.")
    return Dialogue((question,), answer, f"The user wants a story about a {animal}.")


PATTERNS: tuple[Callable[[random.Random], Dialogue], ...] = (
    addition,
    add_call,
    add_result,
    weather_call,
    weather_calls,
    weather_result,
    capital,
    name,
    count,
    story,
)


def _with(rng: random.Random, needed: str) -> tuple[str, ...]:
    """The tool that is needed, in half of the dialogues together with the other one."""
    return (needed,) if rng.random() < 0.5 else tuple(TOOLS)


def draw(rng: random.Random) -> Dialogue:
    """A dialogue of any pattern; half of them think, a third have a system message."""
    return vary(rng.choice(PATTERNS)(rng), rng)


def vary(dialogue: Dialogue, rng: random.Random) -> Dialogue:
    """The same question with or without thinking and system message."""
    system = ({"role": "system", "content": SYSTEM},) if rng.random() < 1 / 3 else ()
    messages = (*system, *dialogue.messages)
    return replace(dialogue, messages=messages, thinking=rng.random() < 0.5)
