"""Requests of Anthropic's Messages API, prepared as chats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

import orjson
from surestep_common.errors import InvalidRequest, UnsupportedParameter
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.apis.conversation import Conversation, Json, shared_fields
from surestep_gateway.request.parse import parse, parse_fields, refuse_in_messages
from surestep_gateway.request.prepare import chat_texts, check_model, draft_chat_request
from surestep_gateway.request.prepared import PreparedRequest, dump_prepared, load_prepared
from surestep_gateway.request.protocol import ChatRequest
from surestep_gateway.request.render import result_part
from surestep_gateway.text.service import Draft, Job, TextProcessor, dump_bytes, load_bytes

from .body import (
    Block,
    CountTokensRequest,
    MediaBlock,
    Message,
    MessagesBody,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

_BILLING = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)

# How names of fields of the chat begin that a request becomes, and what clients call them.
FIELD_NAMES = {
    "reasoning_effort": "output_config.effort",
    r"response_format(\.json_schema)?": "output_config.format",
    "stop": "stop_sequences",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
}


def draft_message(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[PreparedRequest]:
    """POST /v1/messages. Raise SurestepError."""
    return draft_chat_request(processor, _chat(parse(MessagesRequest, raw)), info)


def draft_count(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[bytes]:
    """POST /v1/messages/count_tokens, to the JSON of the response. Raise SurestepError."""
    chat = _chat(parse(CountTokensRequest, raw))
    check_model(processor.settings, chat.model, info)
    texts = chat_texts(processor, chat, info)
    return Draft(texts, lambda encoded: orjson.dumps({"input_tokens": len(encoded[0])}))


def _chat(body: MessagesBody) -> ChatRequest:
    """Return the request as one of a chat. Raise InvalidRequest."""
    refuse_in_messages(body)
    given = shared_fields(body, _format(body), "output_config.format")
    choice, config = body.tool_choice, body.output_config
    goes_on = body.messages[-1].role == "assistant"
    given |= {
        "messages": _messages(body),
        "stream": body.stream,
        "max_tokens": body.max_tokens,
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        "tool_choice": _tool_choice(choice) if choice is not None else None,
        "reasoning_effort": config.effort if config else None,
        "continue_final_message": True if goes_on else None,
        "chat_template_kwargs": _variables(body),
    }
    if body.stop_sequences is not None:
        given["stop"] = body.stop_sequences
    if choice is not None and choice.disable_parallel_tool_use:
        given["parallel_tool_calls"] = False
    if body.metadata is not None and body.metadata.user_id is not None:
        given["user"] = body.metadata.user_id
    return parse_fields(ChatRequest, given)


def _messages(body: MessagesBody) -> list[Json]:
    conversation = Conversation()
    if body.system:
        conversation.instruct(_without_billing(body.system))
    for number, message in enumerate(body.messages):
        if message.role == "system":
            conversation.instruct(_text_only(message, number))
        elif isinstance(message.content, str):
            if message.role == "assistant":
                conversation.answer(message.content)
            else:
                conversation.say(message.role, message.content)
        else:
            _add(message.role, message.content, f"messages[{number}].content", conversation)
    return conversation.messages


def _add(role: str, blocks: Sequence[Block], place: str, conversation: Conversation) -> None:
    """Add the blocks of a message; neighbouring texts are one."""
    numbered = list(enumerate(blocks))
    for is_text, group in groupby(numbered, key=lambda pair: isinstance(pair[1], TextBlock)):
        run = list(group)
        if is_text:
            texts = [block for _, block in run if isinstance(block, TextBlock)]
            if role == "assistant":
                conversation.answer(_text(texts))
            else:
                parts = [{"type": "text", "text": block.text} for block in texts]
                conversation.say(role, parts)
            continue
        for number, block in run:
            _add_block(role, block, f"{place}[{number}]", conversation)


def _add_block(role: str, block: Block, place: str, conversation: Conversation) -> None:
    match block:
        case ToolResultBlock() if role == "user":
            parts = block.content or ""
            parts = [{"text": parts}] if isinstance(parts, str) else parts
            conversation.result(block.tool_use_id, "\n".join(map(result_part, parts)))
        case MediaBlock() if role == "user" and conversation.after_result:
            conversation.say(role, result_part({"type": block.type}))
        case MediaBlock():
            raise UnsupportedParameter(
                f"{place}: no blocks of type '{block.type}' here", param=place
            )
        case ThinkingBlock() if role == "assistant":
            conversation.think(block.thinking)
        case ToolUseBlock() if role == "assistant":
            conversation.call(block.id, block.name, block.input)
        case _ if block.type != "redacted_thinking":
            raise InvalidRequest(
                f"{place}: a message of the role '{role}' has no blocks of type '{block.type}'",
                param=place,
            )


def _text_only(message: Message, number: int) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    if len(texts) < len(message.content):
        place = f"messages[{number}].content"
        raise InvalidRequest(f"{place}: instructions are text", param=place)
    return _text(texts)


def _text(content: str | Iterable[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)


def _without_billing(system: str | Sequence[TextBlock]) -> str:
    """Return instructions without Claude Code's line for the bill.

    It differs from one request to the next, and no request would find its prefix in the cache.
    """
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    kept = [_BILLING.sub("", text) for text in texts]
    return "\n".join(new for new, old in zip(kept, texts, strict=True) if new or not old)


def _tool(tool: MessagesTool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: MessagesToolChoice) -> str | Json:
    """Return the choice as chats have it. Raise InvalidRequest."""
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise InvalidRequest("tool_choice.name: which tool?", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _format(body: MessagesBody) -> Json | None:
    asked = body.output_config.format if body.output_config else None
    if asked is not None and body.output_format is not None:
        raise InvalidRequest(
            "'output_format' and 'output_config.format' both say what the output must be",
            param="output_format",
        )
    asked = asked or body.output_format
    if asked is None:
        return None
    schema = {"name": "output", "schema": asked.json_schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema | (asked.model_extra or {})}


def _variables(body: MessagesBody) -> Json | None:
    """Return variables of the chat template: whether to think is known by two names."""
    if body.thinking is None:
        return body.chat_template_kwargs
    enabled = body.thinking.type != "disabled"
    wanted = {"enable_thinking": enabled, "thinking": enabled}
    return wanted | (body.chat_template_kwargs or {})


MESSAGE: Job[PreparedRequest] = Job(b"message", draft_message, dump_prepared, load_prepared)
COUNT: Job[bytes] = Job(b"count", draft_count, dump_bytes, load_bytes)
