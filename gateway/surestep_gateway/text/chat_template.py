"""Chat templates: from messages to prompt text."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from surestep_common import model_files
from surestep_common.errors import InvalidRequest

from .process_limits import NeedsProcess, TurnLimit

# Private use characters mean nothing to templates. The space shows whether the template trims.
_CONTINUE_MARK = "\ue000continue\ue000 "
_HARMONY_MARK = "<|channel|>"
_ASKS_FOR_NONE = re.compile(r"content['\"]?\]? is none")
_TRIAL_TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
]
_PLAIN = ("user", "assistant", "user")
INSTRUCTING = "system", "developer"  # roles
_MAX_CHARS = 1 << 17  # of a model's template; published ones have up to 30,000
_MAX_BITS, _MAX_LENGTH = 1 << 12, 1 << 27  # of a power, of a product
_TRIAL_S = 1.0  # of computing
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class ChatTemplate:
    """The template of a model folder, compiled once."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        *,
        tool_source: str | None = None,
    ) -> None:
        """`tool_source` serves chats with tools, where a checkpoint has a template for them."""
        self.definition = (source, dict(special_tokens), tool_source)  # to make another one of
        self._environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._default = self._compile(source) if source is not None else None
        self._with_tools = self._compile(tool_source) if tool_source is not None else self._default
        # What it reads: roles in this order, with tools or not, and some of them in parts.
        self._tried = dict[tuple[tuple[str, ...], bool, frozenset[str]], bool]()
        self._parts = [self._goes_through_parts(each) for each in (source, tool_source or source)]

    @classmethod
    def load(cls, folder: Path, override: str | None = None) -> ChatTemplate:
        """Load template and special tokens of a folder. Raise InvalidRequest naming a broken one.

        `override` is a file with another template, or the template itself.
        """
        config = _read_json(folder / "tokenizer_config.json")
        special = _read_json(folder / "special_tokens_map.json") | config
        tokens = {name: _token_text(special.get(name)) for name in _SPECIAL_TOKENS}
        try:
            sources = {"default": _given(override)} if override else _sources(folder, config)
            known = {name: text for name, text in tokens.items() if text is not None}
            _check_sizes(sources)
            made = cls(sources.get("default"), known, tool_source=sources.get("tool_use"))
            made._try_out()
            return made
        except (OSError, ValueError, KeyError, TypeError, AttributeError, InvalidRequest) as error:
            where = "--chat-template" if override else folder
            raise InvalidRequest(f"{where}: {error}", param="chat_template") from error

    def _try_out(self) -> None:
        """Raise InvalidRequest if a greeting takes too long, as with a template without an end.

        Other faults are for the requests to meet: a template may want more than a greeting.
        """
        try:
            with TurnLimit(_TRIAL_S):
                self.render([{"role": "user", "content": "hello"}])
        except NeedsProcess as error:
            raise InvalidRequest(f"chat template: {error}") from error
        except InvalidRequest:
            return

    def replaced_by(self, source: str) -> ChatTemplate:
        """Return another template for the same model. Raise InvalidRequest with its error."""
        return ChatTemplate(source, self._special_tokens)

    def takes_parts(self, *, tools: bool) -> bool:
        """Return whether the template iterates over message parts."""
        return self._parts[tools]

    def roles_in_parts(self, *, tools: bool) -> frozenset[str]:
        """Return the roles whose contents the template reads in parts, and loses as texts."""

        def reads(roles: tuple[str, ...], in_parts: frozenset[str]) -> bool:
            return self._reads(roles, tools=tools, in_parts=in_parts)

        if not self.takes_parts(tools=tools):
            return frozenset()
        if not reads(_PLAIN, frozenset()):
            return frozenset({*INSTRUCTING, *_PLAIN})
        needed = frozenset[str]()
        for role in INSTRUCTING:  # a developer that is not known becomes a system
            roles, alone = (role, "user"), frozenset({role})
            if not reads(roles, frozenset()) and (needed or reads(roles, alone)):
                needed |= alone
        return needed

    def writes_harmony(self, *, tools: bool) -> bool:
        """Return whether the template writes the format of gpt-oss."""
        return _HARMONY_MARK in self._source(tools=tools)

    def knows_developer(self, *, tools: bool) -> bool:
        """Return whether the template names the role `developer`, and reads what it says."""
        named = "developer" in self._source(tools=tools)
        return named and self.reads(("developer", "user"), tools=tools)

    @cached_property
    def writes_pairs(self) -> bool:
        """Return whether the template has messages of the roles query and document."""
        source = self._source(tools=False)
        return all(re.search(rf"""["']{role}["']""", source) for role in ("query", "document"))

    def reads(self, roles: tuple[str, ...], *, tools: bool) -> bool:
        """Return whether the template takes messages of these roles in this order, and all
        texts.
        """
        return self._reads(roles, tools=tools, in_parts=self.roles_in_parts(tools=tools))

    def _reads(self, roles: tuple[str, ...], *, tools: bool, in_parts: frozenset[str]) -> bool:
        key = roles, tools, in_parts
        if key not in self._tried:
            self._tried[key] = self._renders_all(*key)
        return self._tried[key]

    def _renders_all(self, roles: tuple[str, ...], tools: bool, in_parts: frozenset[str]) -> bool:
        trial = [
            {"role": role, "content": _trial_content(f"{role}{n}", parts=role in in_parts)}
            for n, role in enumerate(roles)
        ]
        try:
            text = self.render(trial, tools=_TRIAL_TOOLS if tools else None)
        except InvalidRequest:
            return False
        return all(f"{role}{n}" in text for n, role in enumerate(roles))

    def with_call(self, tool: Mapping[str, Any], call: Mapping[str, Any]) -> str:
        """Return a chat in which a tool was called; empty if the template refuses it."""
        with contextlib.suppress(InvalidRequest, NeedsProcess), TurnLimit(_TRIAL_S):
            parts = "user" in self.roles_in_parts(tools=True)
            question, result = (
                _trial_content(each, parts=parts) for each in ("question", "result")
            )
            chat: list[dict[str, Any]] = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": result},
            ]
            return self.render(chat, tools=[tool])
        return ""

    def _source(self, *, tools: bool) -> str:
        return (tools and self.definition[2]) or self.definition[0] or ""

    def _goes_through_parts(self, source: str | None) -> bool:
        if source is None:
            return False
        try:
            loops = self._environment.parse(source).find_all(jinja2.nodes.For)
        except Exception:  # noqa: BLE001  # rendering reports it
            return False
        return any(_is_content(loop.iter) for loop in loops)

    def _compile(self, source: str) -> jinja2.Template:
        try:
            return self._environment.from_string(source)
        except Exception as error:  # what Jinja makes of it may be no program, or too deep for one
            raise _complaint(error, "chat_template") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text. Raise InvalidRequest with the template's error."""
        template = self._with_tools if tools else self._default
        if template is None:
            raise InvalidRequest("this model has no chat template", param="messages")
        taken = _RESERVED & set(variables or ())
        if taken:
            raise InvalidRequest(
                f"{', '.join(sorted(taken))} cannot be set here", param="chat_template_kwargs"
            )
        asks_for_none = _ASKS_FOR_NONE.search(self._source(tools=bool(tools)))

        def filled(*, none: bool) -> str:
            chat = [_shown(message, none=none) for message in messages]
            if continue_final_message:
                _mark_end(chat)
            try:
                return template.render(
                    {**self._special_tokens, **(variables or {})},
                    messages=chat,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                )
            except Exception as error:  # templates fail in any way a program can
                raise _complaint(error, "messages") from error

        try:
            text = filled(none=asks_for_none is not None)
        except InvalidRequest:
            if asks_for_none is None:
                raise
            text = filled(none=False)  # some ask and then take it for a list, as Ministral-3's
        return _cut_at_mark(text) if continue_final_message else text


def _trial_content(text: str, *, parts: bool) -> Any:
    return [{"type": "text", "text": text}] if parts else text


class _Arguments(dict[str, Any]):
    """Arguments of a call: an object, or its JSON for templates that put calls together."""

    def __radd__(self, text: str) -> str:
        return text + _tojson(self)


def _shown(message: Mapping[str, Any], *, none: bool) -> dict[str, Any]:
    """Return a message as templates are written for: with `none` there is no content, instead of an
    empty one, beside calls.
    """
    shown = dict(message)
    if calls := shown.get("tool_calls"):
        shown["tool_calls"] = [_with_arguments(call) for call in calls]
        if none and not shown.get("content"):
            shown["content"] = None
    return shown


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": _Arguments(function["arguments"])}}


def _complaint(error: Exception, param: str) -> Exception:
    """Return the error for a template that failed."""
    if isinstance(error, InvalidRequest | NeedsProcess):
        return error
    message = "it needs too much memory" if isinstance(error, MemoryError) else str(error)
    return InvalidRequest(f"chat template: {message}", param=param)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Refuses products and powers that no limit of time could interrupt."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute one of them. Raise MemoryError."""
        match operator, left, right:
            case "**", int(), int() if abs(right) * left.bit_length() > _MAX_BITS:
                raise MemoryError
            case "*", (str() | list() | tuple()), int() if len(left) * right > _MAX_LENGTH:
                raise MemoryError
            case "*", int(), (str() | list() | tuple()) if left * len(right) > _MAX_LENGTH:
                raise MemoryError
        return super().call_binop(context, operator, left, right)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the Jinja environment that Hugging Face templates are written for."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares a set

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own escapes HTML


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)  # the templates mean local time


def _is_content(node: jinja2.nodes.Node) -> bool:
    """Return whether an expression of a template is named `content`, filtered or not."""
    match node:
        case jinja2.nodes.Filter(node=inner):
            return isinstance(inner, jinja2.nodes.Node) and _is_content(inner)
        case jinja2.nodes.Name(name=name) | jinja2.nodes.Getattr(attr=name):
            return bool(name == "content")
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value=name)):
            return bool(name == "content")
    return False


def _mark_end(chat: list[dict[str, Any]]) -> None:
    content = chat[-1].get("content")
    if isinstance(content, list) and content:
        last = content[-1]
        chat[-1]["content"] = [*content[:-1], {**last, "text": last["text"] + _CONTINUE_MARK}]
        return
    if not isinstance(content, str) or not content:
        raise InvalidRequest("the final message has no text to continue", param="messages")
    chat[-1]["content"] = content + _CONTINUE_MARK


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_CONTINUE_MARK.rstrip())
    if end < 0:
        raise InvalidRequest(
            "the chat template leaves out the message to continue", param="continue_final_message"
        )
    trimmed = not text.startswith(_CONTINUE_MARK, end)
    return text[:end].rstrip() if trimmed else text[:end]


def _given(template: str) -> str:
    """Return the text of a template that is given as a file or as text."""
    return template if "{" in template else Path(template).read_text()


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return templates by name; a checkpoint with a single one has the default."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return {"default": model_files.read(path).decode()}
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {"default": template} if template is not None else {}


def _check_sizes(sources: Mapping[str, str]) -> None:
    if any(len(text) > _MAX_CHARS for text in sources.values()):
        raise InvalidRequest(f"the chat template has more than {_MAX_CHARS} characters")


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    content = model_files.read_json(path) if path.exists() else None
    return content if isinstance(content, dict) else {}
