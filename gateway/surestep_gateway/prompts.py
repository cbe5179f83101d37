"""Prompts: messages, text or token ids to the ids that the model reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from surestep_common.errors import InvalidRequest

from .context import Gateway
from .protocol import ChatBody, CompletionBody, Message, TemplateFields, ToolCall
from .sampling import fit_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a request."""

    token_ids: list[int]
    text: str | None  # None when it came as token ids, or was cut


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt(Prompt):
    """The prompt of a chat."""

    text: str  # even where its ids were cut
    begun: str  # the part of the answer that the prompt ends with


async def chat_prompt(gateway: Gateway, body: ChatBody) -> ChatPrompt:
    """The prompt of a chat. Raises InvalidRequest naming the parameter."""
    text = render_chat(gateway, body)
    ids = await gateway.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    fitted = fit_prompt(ids, body, gateway.pool.info, "messages")
    return ChatPrompt(token_ids=fitted, text=text, begun=_begun(body))


async def completion_prompts(gateway: Gateway, body: CompletionBody) -> list[Prompt]:
    """The prompts of a completion. Raises InvalidRequest naming the parameter."""
    prompts = []
    for given in _prompt_list(body.prompt):
        if isinstance(given, str):
            add = body.add_special_tokens is not False
            ids = await gateway.tokenizer.encode(given, add_special_tokens=add)
            prompts.append(_fitted(gateway, body, ids, given))
        else:
            prompts.append(_fitted(gateway, body, given, None))
    if not prompts:
        raise InvalidRequest("'prompt' must not be empty", param="prompt")
    return prompts


def render_chat(gateway: Gateway, body: TemplateFields) -> str:
    """Prompt text of messages. Raises InvalidRequest naming the parameter."""
    if body.chat_template is not None and not gateway.settings.trust_request_chat_template:
        raise InvalidRequest(
            "'chat_template' is refused: the server does not trust templates of requests",
            param="chat_template",
        )
    go_on = bool(body.continue_final_message)
    add_prompt = body.add_generation_prompt
    if go_on and add_prompt:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' exclude each other",
            param="continue_final_message",
        )
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return gateway.template.render(
        [_template_message(body, index) for index in range(len(body.messages))],
        add_generation_prompt=not go_on if add_prompt is None else add_prompt,
        continue_final_message=go_on,
        tools=[tool.model_dump(exclude_unset=True) for tool in body.tools or ()] or None,
        variables=variables,
        source=body.chat_template,
    )


def _begun(body: TemplateFields) -> str:
    if not body.continue_final_message:
        return ""
    return _content(body.messages[-1], len(body.messages) - 1)


def _template_message(body: TemplateFields, index: int) -> dict[str, Any]:
    """A message as templates expect it."""
    given = body.messages[index]
    message = given.model_dump(exclude_none=True, exclude={"tool_calls"})
    message["content"] = _content(given, index)
    if given.reasoning is not None:
        message.setdefault("reasoning_content", given.reasoning)
    if given.tool_calls:  # an empty list would look like calls to some templates
        message["tool_calls"] = [_template_call(call) for call in given.tool_calls]
    return message


def _template_call(call: ToolCall) -> dict[str, Any]:
    """Templates go through the arguments, so that they want an object in place of JSON text.

    Text that is none becomes an empty object: it came from an earlier answer of a model, and a
    refusal would end the conversation for good.
    """
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    shown = call.model_dump(exclude_unset=True)
    shown["function"]["arguments"] = arguments if isinstance(arguments, dict) else {}
    return shown


def _content(message: Message, index: int) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    return "\n".join(
        _text_part(part, f"messages[{index}].content[{n}]")
        for n, part in enumerate(message.content)
    )


def _text_part(part: dict[str, Any], param: str) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise InvalidRequest(f"{param}: only parts of type 'text' are supported", param=param)
    return text


def _prompt_list(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[int(i) for i in prompt if isinstance(i, int)]]
    return [one for one in prompt if not isinstance(one, int)]


def _fitted(gateway: Gateway, body: CompletionBody, ids: list[int], text: str | None) -> Prompt:
    fitted = fit_prompt(ids, body, gateway.pool.info, "prompt")
    whole = len(fitted) == len(ids)
    return Prompt(token_ids=fitted, text=text if whole else None)
