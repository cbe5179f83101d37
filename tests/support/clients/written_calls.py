"""Calls as models write them, in every format."""

from __future__ import annotations

import json
from typing import NamedTuple

HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
CODER = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
CODER_CITY = "<parameter=city>\n{}\n</parameter>\n"
GLM45 = "<tool_call>{}\n{}</tool_call>"
GLM45_CITY = "<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
DSML = '<｜DSML｜invoke name="{}">\n{}</｜DSML｜invoke>'
DSML_CITY = '<｜DSML｜parameter name="city" string="true">{}</｜DSML｜parameter>\n'
PYTHON = "{}({})"
LISTED = '{{"name": "{}", "arguments": {}}}'
KIMI = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
SEED = CODER.replace("tool_call>", "seed:tool_call>")
SEED_CITY = "<parameter=city>{}</parameter>\n"
STEP = (
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{}">{}'
    "</steptml:invoke><｜tool_call_end｜>"
)
STEP_CITY = '<steptml:parameter name="city">{}</steptml:parameter>'
STEP_SECTION = "<｜tool_calls_begin｜>{}<｜tool_calls_end｜>"
ACTION = '<|action_start|><|plugin|>\n{{"name": "{}", "parameters": {}}}<|action_end|>'
M2 = '<invoke name="{}">\n{}</invoke>'
M2_CITY = '<parameter name="city">{}</parameter>\n'


class Written(NamedTuple):
    """How a format has calls: `call` takes a name and the arguments."""

    call: str
    city: str | None = None  # of arguments with tags, and of the other parameter
    days: str | None = None
    section: str = "{}"
    between: str = "\n"

    def one(
        self, name: str, city: str | None, days: str | None = None, *, more: bool = False
    ) -> str:
        """A call."""
        if self.city is None or self.days is None:
            key = "{}=" if self.call == PYTHON else '"{}": '
            parts = [key.format("city") + json.dumps(city)] * (city is not None)
            parts += [f"{key.format('days')}{days}"] * (days is not None)
            parts += [key.format("more") + "1"] * more
            given = ", ".join(parts)
            return self.call.format(name, given if self.call == PYTHON else f"{{{given}}}")
        values = [self.city.format(city)] * (city is not None)
        return self.call.format(name, "".join(values) + (self.days.format(days) if days else ""))

    def all(self, *calls: str) -> str:
        """What an output has of calls."""
        return self.section.format(self.between.join(calls))


LLAMA = '{{"name": "{}", "parameters": {}}}'
WRITTEN = {
    "hermes": Written(HERMES),
    "llama3_json": Written(LLAMA, between="; "),
    "mistral": Written("[TOOL_CALLS]{}[ARGS]{}", between=""),
    "mistral, old": Written(LISTED, section="[TOOL_CALLS] [{}]", between=", "),
    "xlam": Written(LISTED, section="[{}]", between=", "),
    "pythonic": Written(PYTHON, section="[{}]", between=", "),
    "olmo3": Written(PYTHON, section="<function_calls>{}</function_calls>"),
    "granite": Written(LISTED, section="<|tool_call|>[{}]", between=", "),
    "granite-20b-fc": Written(f"<function_call> {LISTED}", between=""),
    "phi4_mini_json": Written(LISTED, section="functools[{}]", between=", "),
    "hunyuan_a13b": Written(LISTED, section="<tool_calls>[{}]</tool_calls>", between=", "),
    "minimax": Written(LISTED, section="<tool_calls>\n{}\n</tool_calls>"),
    "nemotron_json": Written(LISTED, section="<TOOLCALL>[{}]</TOOLCALL>", between=", "),
    "internlm": Written(ACTION, between=""),
    "kimi_k2": Written(KIMI, section=KIMI_SECTION, between=""),
    "seed_oss": Written(SEED, SEED_CITY, SEED_CITY.replace("city", "days")),
    "qwen3_coder": Written(CODER, CODER_CITY, CODER_CITY.replace("city", "days")),
    "glm45": Written(GLM45, GLM45_CITY, GLM45_CITY.replace("city", "days")),
    "glm47": Written(
        GLM45.replace("\n", ""),
        GLM45_CITY.replace("\n", ""),
        GLM45_CITY.replace("\n", "").replace("city", "days"),
        between="",
    ),
    "deepseek_v3": Written(V3, section=SECTION),
    "deepseek_v31": Written(V31, section=SECTION, between=""),
    "deepseek_v32": Written(
        DSML,
        DSML_CITY,
        DSML_CITY.replace("city", "days").replace("true", "false"),
        "<｜DSML｜function_calls>\n{}\n</｜DSML｜function_calls>",
    ),
    "step3": Written(STEP, STEP_CITY, STEP_CITY.replace("city", "days"), STEP_SECTION, ""),
    "minimax_m2": Written(
        M2,
        M2_CITY,
        M2_CITY.replace("city", "days"),
        "<minimax:tool_call>\n{}\n</minimax:tool_call>",
    ),
}
TOOLS = [tools for tools in WRITTEN if "old" not in tools]
UNMARKED = ["llama3_json", "xlam", "pythonic"]
GOOD = {tools: one.one("weather", 'Os"lo\n<b>', "2") for tools, one in WRITTEN.items()}
BAD = {
    tools: [
        one.one("weather", None),
        one.one("other", "x"),
        one.one("weather", "x", "x") if one.city else one.one("weather", "x", more=True),
    ]
    for tools, one in WRITTEN.items()
}
