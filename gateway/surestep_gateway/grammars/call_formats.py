"""Formats of calls, as the parsers read them, and their languages.

Texts are as the checkpoints' templates write them, so that what is certain is certain to the token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from surestep_common.errors import InvalidRequest

from surestep_gateway.parsers.json_calls import ARGUMENTS, ASIDE
from surestep_gateway.parsers.pythonic import is_keyword
from surestep_gateway.parsers.schema import resolved

from .language import ANYTHING, Json, TokenName, inline, markers, pattern, quoted, up_to

Schemas = Mapping[str, Json | None]  # of parameters, by functions; None: they may be anything

TAG = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\]|functools\[)")
_STYLE: Json = {
    "whitespace_flexible": False,
    "key_separator": ": ",
    "item_separator": ", ",
    "lenient": True,
}


class CallFormat(NamedTuple):
    """The texts of a format, with `{name}`, `{json_name}`, `{key}` and `{string}` to be put in, and
    NUMBER for one of at most four digits.
    """

    begin: str  # of a call, in front of the arguments
    end: str
    # Around the value of a parameter; None: the arguments are one JSON object.
    parameter: tuple[str, str] | None = None
    section: tuple[str, str] = ("", "")  # around all calls
    between: str = "\n"  # two calls
    arguments: str = ""  # the key of arguments, where a call is one JSON object and nothing else
    keywords: bool = False  # the arguments are Python's
    # Patterns of Lark for what parsers take for the beginning of a call, besides the first marker.
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()  # and of a string, where its closing tag is missing


_SPACE = r"[\s\x1c-\x1f]*"
_KEYS = "|".join(("name", "function", *ARGUMENTS, *ASIDE))
_OBJECT = rf'\{{{_SPACE}"({_KEYS})"'
_BARE = (_OBJECT, r"\[TOOL_CALLS\]")
NAMES = "@NAMES@"  # in a pattern, those of the functions
NUMBER = "@NUMBER@"
_TOOL_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_GLM = CallFormat(
    "<tool_call>{name}",
    "</tool_call>",
    ("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"),
    between="",
    ends=("<arg_key>", rf"</tool_call>{_SPACE}<tool_call>"),
)
_CODER = CallFormat(
    "<tool_call>\n<function={name}>\n",
    "</function>\n</tool_call>",
    ("<parameter={key}>\n", "\n</parameter>\n"),
    begins=("<function=",),
    ends=(
        "<parameter=",
        rf"</function>{_SPACE}(<function=|</tool_call>)",
        rf"</tool_call>{_SPACE}<tool_call>",
    ),
)
_LLAMA = CallFormat("", "", arguments="parameters", between="; ", begins=_BARE)
_LISTED = CallFormat(
    '{{"name": {json_name}, "arguments": ',
    "}}",
    section=("[", "]"),
    between=", ",
    begins=_BARE,
)
_SECTION = CallFormat(
    '{{"name": {json_name}, "arguments": ',
    "}}",
    section=("<tool_calls>[", "]</tool_calls>"),
    between=", ",
)
_PYTHON = CallFormat(
    "{name}(",
    ")",
    ("{key}=", ""),
    ("[", "]"),
    between=", ",
    keywords=True,
    begins=(_OBJECT, rf"({NAMES}){_SPACE}\("),
)
_OLD_MISTRAL = "mistral before 2025"
_HERMES = CallFormat('<tool_call>\n{{"name": {json_name}, "arguments": ', "}}\n</tool_call>")
FORMATS = {
    "hermes": _HERMES,
    "ernie45": _HERMES,
    "granite4": _HERMES,
    "granite": _SECTION._replace(section=("<|tool_call|>[", "]"), begins=(_OBJECT,)),
    "granite-20b-fc": CallFormat(
        '<function_call> {{"name": {json_name}, "arguments": ', "}}", between="", begins=(_OBJECT,)
    ),
    "phi4_mini_json": _SECTION._replace(section=("functools[", "]"), begins=(_OBJECT,)),
    "hunyuan_a13b": _SECTION,
    "jamba": _SECTION,
    "minimax": _SECTION._replace(section=("<tool_calls>\n", "\n</tool_calls>"), between="\n"),
    "nemotron_json": _SECTION._replace(section=("<TOOLCALL>[", "]</TOOLCALL>")),
    "internlm": CallFormat(
        '<|action_start|><|plugin|>\n{{"name": {json_name}, "parameters": ',
        "}}<|action_end|>",
        between="",
    ),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "mistral": CallFormat("[TOOL_CALLS]{name}[ARGS]", "", between="", begins=(_OBJECT,)),
    _OLD_MISTRAL: _LISTED._replace(section=("[TOOL_CALLS] [", "]"), begins=(_OBJECT,)),
    "xlam": _LISTED,
    "pythonic": _PYTHON,
    "llama4_pythonic": _PYTHON,
    "olmo3": _PYTHON._replace(section=("<function_calls>", "</function_calls>"), between="\n"),
    "qwen3_coder": _CODER,
    "qwen3_xml": _CODER,
    "seed_oss": CallFormat(
        _CODER.begin.replace("<tool_call>", "<seed:tool_call>"),
        _CODER.end.replace("</tool_call>", "</seed:tool_call>"),
        ("<parameter={key}>", "</parameter>\n"),
        begins=_CODER.begins,
        ends=tuple(end.replace("tool_call>", "seed:tool_call>") for end in _CODER.ends),
    ),
    "glm45": CallFormat(
        f"{_GLM.begin}\n",
        _GLM.end,
        ("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
        ends=_GLM.ends,
    ),
    "glm47": _GLM,
    "deepseek_v3": CallFormat(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        section=_TOOL_CALLS,
        begins=("<｜tool▁call▁begin｜>",),
    ),
    "deepseek_v31": CallFormat(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        section=_TOOL_CALLS,
        between="",
        begins=("<｜tool▁call▁begin｜>",),
    ),
    "kimi_k2": CallFormat(
        f"<|tool_call_begin|>functions.{{name}}:{NUMBER}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        between="",
        begins=tuple(map(re.escape, ("<|tool_call_begin|>", "<|tool_call_section_begin|>"))),
    ),
    "deepseek_v32": CallFormat(
        '<｜DSML｜invoke name="{name}">\n',
        "</｜DSML｜invoke>",
        ('<｜DSML｜parameter name="{key}" string="{string}">', "</｜DSML｜parameter>\n"),
        ("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
        begins=("<｜DSML｜invoke", "<｜DSML｜tool_calls>"),
        ends=("<｜DSML｜parameter", rf"</｜DSML｜invoke>{_SPACE}</?｜DSML｜"),
    ),
    "step3": CallFormat(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">',
        "</steptml:invoke><｜tool_call_end｜>",
        ('<steptml:parameter name="{key}">', "</steptml:parameter>"),
        ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        between="",
        begins=("<steptml:invoke", "<｜tool_call_begin｜>"),
        ends=(
            "<steptml:parameter",
            rf"<｜tool_call_end｜>{_SPACE}(<｜tool_calls_end｜>|<steptml:invoke)",
        ),
    ),
    "minimax_m2": CallFormat(
        '<invoke name="{name}">\n',
        "</invoke>",
        ('<parameter name="{key}">', "</parameter>\n"),
        ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        begins=("<invoke",),
        ends=("<parameter", rf"</invoke>{_SPACE}(</minimax:tool_call>|<invoke)"),
    ),
}


def call_format(name: str, token: TokenName) -> CallFormat:
    """Return the format of a parser. Mistral's tokenizers tell which of its formats is theirs."""
    return FORMATS[_OLD_MISTRAL if name == "mistral" and not token("[ARGS]") else name]


def parser_of(text: str, name: str, key: str, value: str) -> str | None:
    """Return the parser of the format in which a text has a call with one argument."""
    found, there = dict[str, tuple[int, bool]](), _without_space(text)
    for parser, form in FORMATS.items():
        begun = _begun(form, name, key, value)
        if (plain := _without_space(begun)) in there:
            found[parser] = len(plain), begun in text  # spaces decide where nothing else does
    best = max(found, key=lambda each: found[each], default=None)
    return "mistral" if best == _OLD_MISTRAL else best


def _begun(form: CallFormat, name: str, key: str, value: str) -> str:
    """Return a call up to its only argument."""
    if form.arguments:
        return form.section[0] + json.dumps({"name": name, form.arguments: {key: value}})
    if form.parameter is None:
        argument = json.dumps({key: value})
    else:
        shown = json.dumps(value) if form.keywords else value
        argument = form.parameter[0].format(key=key, string="true") + shown
    begin = form.begin.format(name=name, json_name=json.dumps(name)).replace(NUMBER, "0")
    return form.section[0] + begin + argument


def _without_space(text: str) -> str:
    return re.sub(r"\s", "", text)


def text_without(patterns: Iterable[str], text: str = ANYTHING) -> str:
    """Return a Lark expression of texts in which none of the patterns is found."""
    return text + "".join(f" & ~/(?s:.*)({pattern(one)})(?s:.*)/" for one in patterns)


def written(text: str, token: TokenName, **put_in: str) -> str:
    """Return a text as a Lark expression: tags that are tokens are no text."""
    parts = (
        part.format(**put_in) if "{" in part or "}" in part else part for part in TAG.split(text)
    )
    return markers(parts, token).replace(NUMBER, '" /[0-9]{1,4}/ "')


def call_rules(form: CallFormat, schemas: Schemas, token: TokenName) -> str:
    """Return the rule `call`, a call behind the first marker of the text, and what it needs."""
    begin = form.begin if form.section[0] else form.begin.removeprefix(first_tag(form))
    rules, bodies = [], []
    for number, (name, schema) in enumerate(schemas.items()):
        lead = written(begin, token, name=name, json_name=json.dumps(name, ensure_ascii=False))
        if form.arguments:
            body = inline(_object(name, form.arguments, schema))
        elif form.keywords:
            body, needed_rules = _keywords(f"call_{number}", form.end, schema)
            rules += needed_rules
        elif form.parameter is None:
            body = f"{arguments(schema)} {written(form.end, token)}"
        elif schema is None:
            body = "call_rest"
        else:
            named = list(_parameters(form.parameter, schema, token))
            labels = [f"call_{number}_{place}" for place in range(len(named))]
            rules += [f"{label}: {rule}\n" for label, (rule, _) in zip(labels, named, strict=True)]
            taken = [
                label if needed else f"{label}?"
                for label, (_, needed) in zip(labels, named, strict=True)
            ]
            body = " ".join([*taken, written(form.end, token)])
        bodies.append(f"{lead} {body}")
    shared = "" if form.parameter is None else _free(form, token)
    return f"call: {' | '.join(bodies)}\n{''.join(rules)}{shared}"


def first_tag(form: CallFormat) -> str:
    """Return the marker with which the calls of an output begin; empty without one."""
    return next(iter(TAG.findall(form.section[0] or form.begin)), "")


def arguments(schema: Json | None) -> str:
    """Return the language of arguments as JSON."""
    return inline(_allowed(schema) | {"x-guidance": _STYLE})


def _allowed(schema: Json | None) -> Json:
    return schema or {"type": "object"}


def _object(name: str, key: str, schema: Json | None) -> Json:
    allowed = _allowed(schema)
    return _definitions(allowed) | {
        "type": "object",
        "properties": {"name": {"const": name}, key: allowed},
        "required": ["name", key],
        "additionalProperties": False,
        "x-guidance": _STYLE,
    }


def _definitions(schema: Json) -> Json:
    """Return the definitions of a schema, which its parts refer to from its root."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _parameters(
    form: tuple[str, str], schema: Json, token: TokenName
) -> Iterator[tuple[str, bool]]:
    """Yield the language of each parameter, and whether there must be one."""
    for key, value in (schema.get("properties") or {}).items():
        ways = []
        for is_string, text in _values(value, schema, form[1], token):
            string = "true" if is_string else "false"
            ways.append(f"{written(form[0], token, key=key, string=string)} {text}")
        yield " | ".join(ways), key in (schema.get("required") or ())


def _values(schema: Any, whole: Json, end: str, token: TokenName) -> Iterator[tuple[bool, str]]:
    """Yield the languages of a value and its end. Strings are written as they are, others as JSON,
    and what may be either in each way.
    """
    known = _target(schema, whole)
    either = known.get("anyOf") or known.get("oneOf") or ()
    kinds = known.get("type")
    choices = known.get("enum") or [known[key] for key in ("const",) if key in known]
    texts = [str(one) for one in choices if isinstance(one, str) or kinds == "string"]
    others = [one for one in choices if not isinstance(one, str) and kinds != "string"]
    if either and "type" not in known:
        for one in either:
            yield from _values(one, whole, end, token)
    elif texts:
        yield True, f"({' | '.join(map(quoted, texts))}) {written(end, token)}"
        if others:
            yield from _values({"enum": others}, whole, end, token)
    elif isinstance(kinds, list) and "string" in kinds and not choices:
        for kind in kinds:
            yield from _values(known | {"type": kind}, whole, end, token)
    elif kinds == "string":
        yield True, "call_string"
    else:
        json_value = inline(_definitions(whole) | known | {"x-guidance": _STYLE})
        yield False, f"{json_value} {written(end, token)}"


def _target(schema: Any, whole: Json) -> Json:
    """Return the schema of a value, or what it refers to where that says which values there are."""
    known: Json = schema if isinstance(schema, dict) else {}
    target = resolved(known["$ref"], whole) if isinstance(known.get("$ref"), str) else None
    is_plain = isinstance(target, dict) and not {"type", "enum", "const"}.isdisjoint(target)
    return target if isinstance(target, dict) and is_plain else known


def _free(form: CallFormat, token: TokenName) -> str:
    """Return the rules of a string, and of the arguments of a function without a schema."""
    assert form.parameter is not None
    if form.keywords:
        pair = f"call_pair: /[A-Za-z_][A-Za-z0-9_]*=/ {inline({'x-guidance': _STYLE})}\n"
        return f'call_rest: (call_pair (", " call_pair)*)? {quoted(form.end)}\n{pair}'
    lead, end = form.parameter
    rest = _up_to_text("call_rest", form.end, token)
    tags = [token(tag) for tag in TAG.findall(lead + end) if token(tag)]
    if tags:  # text alone has none of them
        inside = f"({ANYTHING} ({' | '.join(tags)}))* {ANYTHING}"
        rest = f"call_rest: {inside} {written(form.end, token)}\n"
    return _up_to_text("call_string", end, token, form.ends) + rest


def _up_to_text(rule: str, end: str, token: TokenName, without: tuple[str, ...] = ()) -> str:
    """Return a rule of any text and its end. The text has none of some patterns."""
    before, tag, after = TAG.split(end, maxsplit=1)
    text = f"{rule}_text"
    if token(tag):
        free = text.upper()  # so that it is one token of Lark
        return f"{rule}: {free} {written(end, token)}\n{free}: {text_without(without)}\n"
    ended = text_without(without, up_to(before + tag))
    return f"{rule}: {text} {written(after, token)}\n{text}[lazy]: {ended}\n"


def _keywords(label: str, end: str, schema: Json | None) -> tuple[str, list[str]]:
    """Return the language of arguments in Python, and the rules that it needs.

    Two rules stand for the arguments from each place on: as the first ones, and behind others.
    """
    if schema is None:
        return "call_rest", []
    named = list((schema.get("properties") or {}).items())
    rules = [f"{label}_{kind}_{len(named)}: {quoted(end)}\n" for kind in ("first", "more")]
    for place, (key, value) in enumerate(named):
        if not is_keyword(key):
            raise InvalidRequest(f"tools: '{key}' cannot be a keyword in Python", param="tools")
        rules.append(f"{label}_{place}: {quoted(f'{key}=')} {_python_value(value, schema)}\n")
        for kind, comma in (("first", ""), ("more", '", " ')):
            rule = f"{comma}{label}_{place} {label}_more_{place + 1}"
            if key not in (schema.get("required") or ()):
                rule += f" | {label}_{kind}_{place + 1}"
            rules.append(f"{label}_{kind}_{place}: {rule}\n")
    return f"{label}_first_0", rules


def _python_value(schema: Any, whole: Json) -> str:
    """Return the language of a value in Python, or in JSON where that is read as well."""
    known = _target(schema, whole)
    if known.get("type") == "boolean" and known.keys().isdisjoint({"enum", "const"}):
        return '("True" | "False")'
    return inline(_definitions(whole) | known | {"x-guidance": _STYLE})
