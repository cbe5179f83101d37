"""Parsing of request bodies; errors name the offending parameter."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from surestep_common.errors import InvalidRequest, MissingParameter, UnsupportedParameter

from .protocol import UNSUPPORTED_KIND, Body
from .unsupported import UNSUPPORTED, WITHOUT_EFFECT

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)


def parse(kind: type[B], raw: bytes | bytearray) -> B:
    """Parse the body as `kind`. Raise InvalidRequest that names the first offending parameter."""
    return parse_by(kind.model_validate_json, raw)


def parse_by(validate: Callable[[bytes | bytearray], B], raw: bytes | bytearray) -> B:
    """Parse a body that may be of several kinds. Raise InvalidRequest as `parse` does."""
    try:
        body = validate(raw)
    except ValidationError as error:
        raise _first_problem(error) from None
    _log_unknown(body)
    return body


def parse_fields(kind: type[B], fields: dict[str, Any]) -> B:
    """Make a body of fields that came in another form. Raise InvalidRequest as `parse` does."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _first_problem(error) from None


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name fields as an API does.

    `names` has its names for those of a chat, by patterns of how these begin.
    """
    try:
        yield
    except InvalidRequest as error:
        old = error.param or ""
        for pattern, name in names.items():
            new, found = re.subn(rf"^{pattern}(?!\w)", name, old)
            if found:
                place = rf"(?<!\w){re.escape(old)}(?!\w)"
                message = re.sub(place, new.replace("\\", r"\\"), error.message)
                raise type(error)(message, param=new) from None
        raise


def _log_unknown(body: Body) -> None:
    if body.model_extra and logger.isEnabledFor(logging.DEBUG):
        unknown = sorted(body.model_extra.keys() - UNSUPPORTED - WITHOUT_EFFECT)
        logger.debug("parameters without meaning here: %s", ", ".join(unknown) or "none")


def _first_problem(error: ValidationError) -> InvalidRequest:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    # A field of several types has a problem per type; a wrong type is the least specific one.
    places = [_place(one["loc"]) for one in problems]
    same_field = [one for one, at in zip(problems, places, strict=True) if at[:1] == places[0][:1]]
    precise = [one for one in same_field if not one["type"].endswith("_type")]
    problem = (precise or problems)[0]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {message}")
    param = _dotted(_place(problem["loc"]))
    if problem["type"] == "missing":
        return MissingParameter(f"missing required parameter '{param}'", param=param)
    if problem["type"] == UNSUPPORTED_KIND:
        return UnsupportedParameter(f"'{param}' is not supported: {message}", param=param)
    return InvalidRequest(f"{param or 'body'}: {message}", param=param or None)


def _place(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return a location without the names of union members."""
    types = ("str", "dict", "list")
    return tuple(
        part
        for part in location
        if isinstance(part, int) or (part.isidentifier() and part not in types)
    )


def _dotted(place: tuple[int | str, ...]) -> str:
    """`messages[0].role`"""
    path = ""
    for part in place:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
