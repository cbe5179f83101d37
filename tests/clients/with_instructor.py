"""instructor, modes MD_JSON and PARALLEL_TOOLS"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import instructor
import openai
from clients import checks
from clients.checks import MODEL, Server, raises, works
from instructor import Mode
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel


class Person(BaseModel):
    """Who is asked for."""

    name: str
    age: int


ADA = {"name": "Ada", "age": 36}


def client(server: Server, mode: Mode, **options: Any) -> Any:
    options = {"api_key": server.key} | options
    made = openai.OpenAI(base_url=server.url, max_retries=0, **options)
    return instructor.from_openai(made, mode=mode)


def request(text: str = checks.JSON_ASKED) -> Any:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_retries": 0}


@works("chat")
def chat(server: Server) -> None:
    """Asked for in the prompt, found between the fences."""
    made = client(server, Mode.MD_JSON).create(response_model=Person, **request())
    assert made.model_dump() == ADA


@works("streaming")
def streaming(server: Server) -> None:
    """Objects that fill field by field."""
    partial = client(server, Mode.MD_JSON).create_partial(response_model=Person, **request())
    seen = [(person.name, person.age) for person in partial]
    assert seen[-1] == ("Ada", 36)
    assert ("Ada", None) in seen


@works("tools")
def tools(server: Server) -> None:
    """Parallel tools are the mode in which the model may choose."""
    made = client(server, Mode.PARALLEL_TOOLS).create(response_model=Iterable[Person], **request())
    assert [one.model_dump() for one in made] == [ADA]


@works("forced tools")
def forced_tools(server: Server) -> None:
    """The default mode names the tool."""
    found = client(server, Mode.TOOLS).create(response_model=Person, **request())
    assert isinstance(found, Person)


@works("JSON schemas")
def schemas(server: Server) -> None:
    for mode in (Mode.JSON, Mode.JSON_SCHEMA):
        found = client(server, mode).create(response_model=Person, **request())
        assert found.model_dump() == ADA


@works("errors")
def errors(server: Server) -> None:
    markdown = Mode.MD_JSON
    with raises(InstructorRetryException, "context_length_exceeded"):
        client(server, markdown).create(response_model=Person, **request(checks.TOO_LONG))
    with raises(InstructorRetryException, "invalid_api_key"):
        client(server, markdown, api_key="wrong").create(response_model=Person, **request())
    with raises(InstructorRetryException, "model_not_found"):
        asked = request() | {"model": "nonesuch"}
        client(server, markdown).create(response_model=Person, **asked)


@works("usage")
def usage(server: Server) -> None:
    made, answer = client(server, Mode.MD_JSON).create_with_completion(
        response_model=Person, **request()
    )
    assert made.model_dump() == ADA
    assert answer.usage.completion_tokens == 7
