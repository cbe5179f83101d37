"""The scripted model as coding agents meet it: it calls their tools, and reports what these said."""

from __future__ import annotations

from pathlib import Path

from clients.scripted_model import SCRIPTS, make_scripted_checkpoint

PATCH = r"*** Begin Patch\n*** Add File: note.txt\n+Oslo\n*** End Patch\n"
# Tools by the agents' names for them, and the arguments that the model calls them with.
_CALLS = {
    "exec_command": '{"cmd": "cat weather.txt"}',
    "exec": '{"input": "text((await tools.exec_command({cmd: \'cat weather.txt\'})).output)"}',
    "apply_patch": f'{{"input": "{PATCH}"}}',
    "mcp__weather__look_outside": '{"city": "Oslo"}',
    "multi_agent_v1__close_agent": '{"target": "nobody"}',
    "Bash": '{"command": "cat weather.txt", "description": "Reads."}',
    "bash": '{"command": "cat weather.txt", "description": "Reads a file."}',
    "run_shell_command": '{"command": "cat weather.txt", "is_background": false}',
    "run_commands": '{"commands": ["cat weather.txt"]}',
    "editor": '{"path": "note.txt", "new_text": "Oslo\\n"}',
    "StructuredOutput": '{"name": "Ada", "age": 36}',
    "structured_output": '{"name": "Ada", "age":  36}',
}
_ASKED = {  # words of the user that a call answers
    "apply_patch": "Write a note",
    "editor": "Write a note",
    "mcp__weather__look_outside": "Look outside",
    "multi_agent_v1__close_agent": "Close the agent",
    "StructuredOutput": "Answer in JSON",
    "structured_output": "Answer in JSON",
}
_CHOICES = "".join(
    f"{{%- elif '{name}' in names and '{_ASKED.get(name, 'weather in Oslo')}' in last -%}}<|{name}|>\n"
    for name in _CALLS
)
TEMPLATE = f"""\
{{%- if tools %}}tools: {{{{ tools | tojson }}}}
{{% endif -%}}
{{%- set place = namespace(last=messages[0]) -%}}
{{%- for message in messages -%}}
{{%- if message.role != 'system' -%}}{{%- set place.last = message -%}}{{%- endif -%}}
<|im_start|>{{{{ message.role }}}}
{{{{ message.content or '' }}}}
{{%- for call in message.tool_calls or [] %}}
<tool_call>{{{{ call.function.name }}}} {{{{ call.function.arguments | tojson }}}}</tool_call>
{{%- endfor -%}}
<|im_end|>
{{% endfor -%}}
{{%- if add_generation_prompt -%}}
<|im_start|>assistant
{{% set names = tools | map(attribute='function.name') | list if tools else [] -%}}
{{%- set last = place.last.content or '' -%}}
{{%- if place.last.role == 'tool' and '3 degrees' in last -%}}<|report|>
{{%- elif place.last.role == 'tool' -%}}<|done|>
{_CHOICES}
{{%- elif 'story that never ends' in last and names -%}}<|story|>
{{%- elif 'Answer in JSON' in last and names -%}}<|json|>
{{%- else -%}}<|talk|>
{{%- endif -%}}
{{%- endif -%}}
"""


def make_agents_checkpoint(folder: Path, corpus: list[str], family: str) -> Path:
    """Write the model of the agents; `corpus` is text like that of their prompts."""
    calls = {
        f"<|{name}|>": (
            f'<tool_call>\n{{"name": "{name}", "arguments": ',
            f"{arguments}}}\n</tool_call>",
        )
        for name, arguments in _CALLS.items()
    }
    told = {name: SCRIPTS[name] for name in ("<|report|>", "<|json|>")}
    scripts = {**calls, **told, "<|done|>": ("Done", " with it.")}
    return make_scripted_checkpoint(folder, scripts, TEMPLATE, corpus, family)
