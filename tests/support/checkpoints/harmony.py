"""A tiny tokenizer with the special tokens of gpt-oss, and a template with the same limits."""

from __future__ import annotations

from pathlib import Path

from support.checkpoints import tiny_tokenizer
from surestep_gateway.parsers.harmony import HarmonyParser

# As the template of gpt-oss: instructions in the first message only, one call in a message, results
# for the function called last, reasoning as `thinking` and only where no answer follows.
TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% set chat = namespace(rest=messages, called=none) %}"
    "{% if messages[0].role in ['system', 'developer'] %}{% set chat.rest = messages[1:] %}"
    "<|start|>developer<|message|>{{ messages[0].content }}<|end|>{% endif %}"
    "{% if tools %}<|start|>developer<|message|>"
    "{% for tool in tools %}{{ '// ' + tool.function.description + '\\n' + tool.function.name }};"
    "{% endfor %}<|end|>{% endif %}"
    "{% for m in chat.rest %}"
    "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}"
    "{% if chat.called is none %}{{ raise_exception('nothing was called') }}{% endif %}"
    "<|start|>functions.{{ chat.called }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'assistant' and m.tool_calls is defined %}"
    "{% if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}"
    "{% set later = namespace(answer=false) %}"
    "{% for n in chat.rest[loop.index:] %}"
    "{% if n.role == 'assistant' and n.tool_calls is not defined %}{% set later.answer = true %}"
    "{% endif %}{% endfor %}"
    "{% if m.thinking and not later.answer %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% set chat.called = m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ chat.called }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}{% set chat.called = none %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def save(folder: Path) -> Path:
    """Write the files of the folder and return it."""
    return tiny_tokenizer.save(folder, *HarmonyParser.structure, template=TEMPLATE)
