"""Chats: from messages to the text that the model reads.

Messages become what chat templates take: parts as text, and roles that they know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from pydantic_core import from_json
from surestep_common.errors import InvalidRequest, UnsupportedParameter

from surestep_gateway.request.harmony_history import (
    check_effort,
    harmony_messages,
    harmony_tools,
)
from surestep_gateway.request.kimi_history import KIMI_CALLS, name_calls
from surestep_gateway.request.protocol import (
    ChatBody,
    ChatMessage,
    ChatRequest,
    TemplateFields,
    ToolCall,
)
from surestep_gateway.settings.api_settings import ApiSettings
from surestep_gateway.text.chat_template import INSTRUCTING, ChatTemplate
from surestep_gateway.text.process_limits import template_limits
from surestep_gateway.text.service import TextProcessor
from surestep_gateway.text.special_tokens import TRUSTED_ROLES, Hidden
from surestep_gateway.text.tokenizer import Texts

Part = dict[str, Any]
Message = dict[str, Any]

INLINE_MESSAGES = 128  # in a chat that is rendered on the event loop
_UNSUPPORTED = frozenset({"audio", "function_call"})  # in messages; the latter before tool calls
_TEXT_PARTS = {  # types of parts, and where their text is; the last two are those of Responses
    "text": "text",
    "refusal": "refusal",
    "input_text": "text",
    "output_text": "text",
}
_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")  # of earlier answers
_INSTRUCTED = ("system", "user")
# Orders of messages that some templates refuse, or lose.
_LATE = ("system", "system", "user", "assistant", "system", "user")
_NEIGHBOURS = ("user", "user", "assistant", "user")
_TYPE_CHARS = 32  # shown of an unknown type


class RenderedChat(NamedTuple):
    """A chat as text."""

    text: str  # as the model is to read it
    stand_ins: str  # the same while special tokens of users and tools are hidden in it
    hidden: Hidden | None  # None when there are none

    def texts(self, processor: TextProcessor, kept: slice, *, add_special_tokens: bool) -> Texts:
        """Return what to encode of the `kept` part."""
        text = (self.text if self.hidden is None else self.stand_ins)[kept]
        if self.hidden is None:
            return Texts([text], add_special_tokens)
        return Texts(
            [processor.tokenizer.named.text(text, self.hidden)], add_special_tokens, named=True
        )


def render_chat(processor: TextProcessor, body: TemplateFields) -> RenderedChat:
    """Return the prompt text of messages. Raise InvalidRequest naming the parameter."""
    if body.chat_template is not None and not processor.settings.trust_request_chat_template:
        raise InvalidRequest(
            "'chat_template' is refused: the server does not trust templates of requests",
            param="chat_template",
        )
    go_on = bool(body.continue_final_message)
    if go_on and body.add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' exclude each other",
            param="continue_final_message",
        )
    processor.only_apart(body.chat_template is not None or len(body.messages) > INLINE_MESSAGES)
    given = (body.chat_template_kwargs or {}).values()  # a template may count to a number, say
    processor.only_apart(not all(isinstance(value, str | bool | None) for value in given))
    variables = _variables(processor.settings, body)
    tools = _tools(processor.settings, body)
    template = _template(processor, body)
    harmony = template.writes_harmony(tools=bool(tools))
    if harmony:
        check_effort(variables.get("reasoning_effort"))
        tools = harmony_tools(tools)
    messages = _messages(processor, body, template, with_tools=tools is not None)
    messages.append({"role": "documents", "content": body.documents})  # trusted no more than users
    messages.append({"role": "tools", "content": tools})
    hidden, special = None, processor.tokenizer.special
    trusted = frozenset[str]() if harmony else TRUSTED_ROLES  # in Harmony no text has markers
    if not processor.settings.allow_special_tokens_in_content and special.untrusted(
        messages, trusted
    ):
        processor.only_apart(True)
        hidden = special.hide(messages, variables, body.chat_template, trusted=trusted)
        messages = hidden.messages
    tools, documents = messages.pop()["content"], messages.pop()["content"]
    if documents is not None:
        variables["documents"] = documents
    with _limits(processor):
        text = template.render(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False and not go_on,
            continue_final_message=go_on,
            tools=tools,
            variables=variables,
        )
    if hidden is None:
        return RenderedChat(text, text, None)
    return RenderedChat(hidden.shown(text), text, hidden)


def _template(processor: TextProcessor, body: TemplateFields) -> ChatTemplate:
    """Return the model's template, or the request's own, which is compiled once."""
    if body.chat_template is None:
        return processor.template
    with _limits(processor):
        return processor.template.replaced_by(body.chat_template)


def _messages(
    processor: TextProcessor, body: TemplateFields, template: ChatTemplate, *, with_tools: bool
) -> list[dict[str, Any]]:
    """Return the messages in the form that the template expects."""
    harmony = template.writes_harmony(tools=with_tools)
    results = of_results(message.role for message in body.messages)
    messages = [_template_message(body, *numbered) for numbered in enumerate(results)]
    if processor.settings.tool_call_parser == KIMI_CALLS:
        name_calls(messages)
    wanted = processor.settings.chat_template_content_format
    if wanted == "openai" or (wanted == "auto" and template.takes_parts(tools=with_tools)):
        with _limits(processor):
            needed = template.roles_in_parts(tools=with_tools)
        for index, message in enumerate(messages):
            role = "user" if message["role"] == "tool" else message["role"]
            if role in needed or _is_in_parts(processor.settings, body.messages[index]):
                message["content"] = _parts(body.messages[index], index, results[index])
    elif harmony:
        messages = harmony_messages(messages)
        processor.only_apart(len(messages) > INLINE_MESSAGES)  # calls have messages of their own
    if harmony or (body.continue_final_message and messages[-1]["role"] in INSTRUCTING):
        return messages
    with _limits(processor):  # the template is tried, a request's too
        return with_known_roles(messages, template, tools=with_tools)


def _variables(settings: ApiSettings, body: TemplateFields) -> dict[str, Any]:
    """Return the template's variables besides the messages."""
    variables = {**(settings.default_chat_template_kwargs or {})}
    if (effort := body.reasoning_effort) is not None:
        variables["reasoning_effort"] = (settings.reasoning_effort_map or {}).get(effort, effort)
        # What most templates know of efforts; DeepSeek's have the shorter name.
        variables["enable_thinking"] = variables["thinking"] = effort != "none"
    if body.verbosity is not None:
        variables["verbosity"] = body.verbosity
    return variables | (body.chat_template_kwargs or {})


def _tools(settings: ApiSettings, body: TemplateFields) -> list[dict[str, Any]] | None:
    left_out = isinstance(body, ChatBody) and body.tool_choice == "none"
    if left_out and settings.exclude_tools_when_tool_choice_none:
        return None
    return [tool.model_dump(exclude_unset=True) for tool in body.tools or ()] or None


def _is_in_parts(settings: ApiSettings, message: ChatMessage) -> bool:
    """Return whether a template that reads texts, too, is given parts of a message.

    They are as the client sent them where the template joins them. It may not look for any beside
    calls, as Kimi's, in results, as GLM's, or in instructions, as Gemma's.
    """
    if message.role == "tool" or message.tool_calls:
        return False
    asked = settings.chat_template_content_format == "openai"
    return asked or (message.role not in INSTRUCTING and isinstance(message.content, list))


def _parts(message: ChatMessage, index: int, of_result: bool) -> str | list[dict[str, Any]]:
    """Return the content as a list, for templates that iterate over it; None stays None."""
    if isinstance(message.content, list):
        texts = _texts(message, index, of_result)
    else:
        text = _content(message, index, of_result)
        texts = [text] if text else []
    return [{"type": "text", "text": text} for text in texts] or ""


def _limits(processor: TextProcessor) -> contextlib.AbstractContextManager[None]:
    """Return the limits of a template. One that is slow on the event loop goes on elsewhere."""
    if not processor.apart:
        return processor.turn
    settings = processor.settings
    return template_limits(settings.chat_template_timeout_s, settings.text_memory_bytes // 2)


def begun(body: TemplateFields) -> str:
    """Return the part of the response with which the prompt ends."""
    if not body.continue_final_message:
        return ""
    return _content(body.messages[-1], len(body.messages) - 1, body.messages[-1].role == "tool")


def echoed(body: ChatRequest) -> str | None:
    """Return the text that begins the response, if the last message is to be part of it."""
    if not body.echo or body.messages[-1].role != "assistant":
        return None
    return _content(body.messages[-1], len(body.messages) - 1)


def answering_role(settings: ApiSettings, body: TemplateFields) -> str:
    """Return the role of the response; a continued message keeps its role."""
    goes_on = body.continue_final_message or body.add_generation_prompt is False
    return body.messages[-1].role if goes_on else settings.response_role


def _template_message(body: TemplateFields, index: int, of_result: bool) -> dict[str, Any]:
    """Return a message in the form that templates expect."""
    given = body.messages[index]
    for name in _UNSUPPORTED & (given.model_extra or {}).keys():
        if (given.model_extra or {})[name]:
            param = f"messages[{index}].{name}"
            raise UnsupportedParameter(f"'{param}' is not supported", param=param)
    message = given.model_dump(exclude_none=True, exclude={"refusal", "tool_calls"})
    message["content"] = _content(given, index, of_result)
    reasoning = given.reasoning
    if reasoning is None and given.role == "assistant" and isinstance(given.content, list):
        reasoning = without_thoughts(given.content)[1] or None
    if reasoning is not None:
        message.setdefault("reasoning_content", reasoning)
    if given.tool_calls:  # an empty list would look like calls to some templates
        message["tool_calls"] = [_template_call(call) for call in given.tool_calls]
    return message


def _template_call(call: ToolCall) -> dict[str, Any]:
    """Return a call whose arguments are an object, which templates iterate over.

    Text that is not an object becomes an empty one: it came from an earlier response of a model,
    and a refusal would end the conversation for good.
    """
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments)  # as bodies are read: neither deep nor half characters
        except ValueError:
            arguments = {}
    shown = call.model_dump(exclude_unset=True)
    shown["function"]["arguments"] = arguments if isinstance(arguments, dict) else {}
    return shown


def _content(message: ChatMessage, index: int, of_result: bool = False) -> str:
    if not isinstance(message.content, list):
        return message.content or message.refusal or ""
    return "\n".join(_texts(message, index, of_result))


def _texts(message: ChatMessage, index: int, of_result: bool) -> list[str]:
    """Return the texts of a content of parts, except reasoning of earlier answers."""
    assert isinstance(message.content, list)
    if of_result:
        return list(map(result_part, message.content))
    parts = message.content
    if message.role == "assistant":
        parts, _ = without_thoughts(parts)
    return [text_part(part, f"messages[{index}].content[{n}]") for n, part in enumerate(parts)]


def text_part(part: Part, param: str) -> str:
    """Return the text of a part, which needs no type. Raise InvalidRequest naming `param`."""
    kind = part.get("type") or "text"
    if kind in _THOUGHTS:
        return _thought(part)
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise UnsupportedParameter(
            f"{param}: only parts of type 'text' are supported, not {str(kind)[:_TYPE_CHARS]!r}",
            param=param,
        )
    field = _TEXT_PARTS[kind]
    text = part.get(field)
    if not isinstance(text, str):
        raise InvalidRequest(f"{param}.{field} must be a string", param=f"{param}.{field}")
    return text


def result_part(part: Part) -> str:
    """Return a part of a tool's result as text, or what was left out.

    Nothing is refused: the client cannot take the result back, and its session would be over.
    """
    kind = part.get("type") or "text"
    field = _TEXT_PARTS.get(kind, "text") if isinstance(kind, str) else "text"
    inner = part.get("content")
    if isinstance(text := part.get(field), str):
        return text
    if isinstance(inner, list):  # of a search result, or a document
        return "\n".join(result_part(one) for one in inner if isinstance(one, dict))
    if isinstance(name := part.get("tool_name"), str):  # a reference to a tool
        return name
    return f"[{str(kind)[:_TYPE_CHARS]} left out: only text is read here]"


def of_results(roles: Iterable[str]) -> list[bool]:
    """Return which messages hold what tools returned, by the roles of all.

    A message of the user between a result and the answer to it is one of them: results of chats are
    texts, so that a client puts a picture that a tool read there.
    """
    found = [False]
    for role in roles:
        found.append(role == "tool" or (found[-1] and role == "user"))
    return found[1:]


def without_thoughts(parts: Sequence[Part]) -> tuple[list[Part], str]:
    """Return the other parts of an answer, and the text of its reasoning."""
    thoughts = [_thought(part) for part in parts if part.get("type") in _THOUGHTS]
    rest = [part for part in parts if part.get("type") not in _THOUGHTS]
    return rest, "\n".join(filter(None, thoughts))


def _thought(part: Part) -> str:
    """Return reasoning, by any of its names; empty where only its author can read it."""
    for key in ("thinking", "reasoning", "text", "content", "summary"):
        value = part.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value:
            texts = [one.get("text") for one in value if isinstance(one, dict)]
            return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def with_known_roles(
    messages: Sequence[Message], template: ChatTemplate, *, tools: bool
) -> list[Message]:
    """Return messages whose instructions the template reads.

    `developer` is `system` to a template without that role. Where it wants one system message, at
    the beginning, all of them become that one; where it wants none, or loses it, they begin the
    first message of the user. Where roles must alternate, neighbouring messages of the user become
    one.
    """
    named = [*messages]
    if any(message["role"] == "developer" for message in messages) and not (
        template.knows_developer(tools=tools)
    ):
        renamed = {"role": "system"}
        named = [one | renamed if one["role"] == "developer" else one for one in messages]
    instructions = [message for message in named if message["role"] == "system"]
    others = [message for message in named if message["role"] != "system"]
    asked = next((n for n, message in enumerate(others) if message["role"] == "user"), None)
    if not instructions:
        pass
    elif asked is not None and not template.reads(_INSTRUCTED, tools=tools):
        begun = _joined([*instructions, others[asked]])
        others[asked] = others[asked] | {"content": begun["content"]}
        named = others
    elif named[0] is not instructions[-1] and not template.reads(_LATE, tools=tools):
        named = [_joined(instructions), *others]
    runs = [(role, list(run)) for role, run in groupby(named, key=lambda one: one["role"])]
    if any(role == "user" and len(run) > 1 for role, run in runs) and not template.reads(
        _NEIGHBOURS, tools=tools
    ):
        parted = ([_joined(run)] if role == "user" else run for role, run in runs)
        named = [message for run in parted for message in run]
    return named


def _joined(messages: Sequence[Message]) -> Message:
    """Return one message: one text, a part of its own where templates go through parts."""
    texts, in_parts = [], False
    for content in (message["content"] for message in messages):
        in_parts |= isinstance(content, list)
        texts += [content] if isinstance(content, str) else [part["text"] for part in content or ()]
    text = "\n\n".join(filter(None, texts))
    return messages[0] | {"content": [{"type": "text", "text": text}] if in_parts else text}
