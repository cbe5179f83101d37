"""Prompts that requests become under templates as they are published."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from support.checkpoints.published import published_template, published_tokenizer
from surestep_gateway.request.prepare import draft_chat
from surestep_gateway.settings.config import GatewaySettings
from surestep_gateway.text.service import Kind, TextProcessor
from surestep_proto.scheduler_pb2 import SchedulerInfo

# What Qwen3.5's template does: system messages are at the beginning, and there is no developer.
STRICT = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if message.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('Unexpected message role.') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}"
    "{% endif %}{{ message.content + '<|im_end|>\\n' }}{% endfor %}"
)
TEMPLATES = {
    "qwen3": ("qwen3", None),
    "qwen3.5": ("qwen3", STRICT),
    "deepseek_v3": ("deepseek_v3", None),
    "llama3_1": ("llama3_1", None),
    "gemma3": ("gemma3", None),
}
WITHOUT_SYSTEM = {  # it is lost, refused, and read in parts only
    "phi3": ("qwen3", "phi3:14b"),
    "gemma2": ("qwen3", "gemma2:2b"),
    "mistral": ("qwen3", "mistral:7b-instruct-fp16"),
    "gemma3_in_gguf": ("qwen3", "gemma3:1b"),
}


class Reader:
    """The prompts that requests become under a template."""

    def __init__(self, folder: Path) -> None:
        settings = {"model": folder, "scheduler_url": ["127.0.0.1:1"], "reasoning_parser": "qwen3"}
        called = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
        loaded = TextProcessor.load(GatewaySettings.model_validate(settings | called))
        # As in a text process, where grammars are checked, too.
        self._processor = dataclasses.replace(loaded, tell=lambda field: None)

    def read(self, draft: Kind[Any], **body: Any) -> str:
        """The prompt of a request."""
        raw = json.dumps({"max_tokens": 1} | body).encode()
        texts = draft(self._processor, raw, SchedulerInfo(max_model_len=4096)).texts
        return texts.texts[0]

    def chat(self, *messages: Any, **body: Any) -> str:
        """The prompt of a chat."""
        return self.read(draft_chat, messages=messages, **body)


def make_reader(name: str, folder: Path) -> Reader:
    """The reader of a template; `folder` takes its files."""
    published, template = (TEMPLATES | WITHOUT_SYSTEM)[name]
    source = published_tokenizer(published)
    config = json.loads((source / "tokenizer_config.json").read_text())
    if template is not None:
        is_name = "{" not in template
        config["chat_template"] = published_template(template) if is_name else template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copy(source / "tokenizer.json", folder)
    return Reader(folder)
