"""`surestep chat`: a conversation with a running server; between pipes, one prompt, one answer."""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text
from surestep_common.errors import InvalidRequest, SurestepError

from .conversation import Conversation

_INTERRUPTED = 130  # exit status
_CONTINUES = "\\"  # at the end of a line that goes on
_HELP = """\
/retry            ask the last question again
/undo             take back the last question and its answer
/reset            forget the conversation
/system [TEXT]    instructions before the first question; none = nothing
/set NAME VALUE   a field of the request, such as temperature 0.2; without VALUE it goes
/show             the request as it would be sent
/save FILE        the conversation as JSON
/quit             or Ctrl-D
A \\ at the end continues the line. Ctrl-C ends an answer."""


def converse(chat: Conversation, console: Console) -> int:
    """Run a conversation in the terminal until /quit or Ctrl-D. Return the exit status."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() with a history and keys to edit
    console.print(f"{chat.fields['model']}: /help lists commands, Ctrl-D ends", style="dim")
    while True:
        try:
            said = _said(console)
        except EOFError:
            console.print()
            return 0
        except KeyboardInterrupt:
            console.print()
            continue
        if said == "/quit":
            return 0
        try:
            if obey(chat, said, console) if said.startswith("/") else _question(chat, said):
                _show_answer(chat, console)
        except SurestepError as error:
            console.print(Text(str(error), style="red"), soft_wrap=True)
        except KeyboardInterrupt:  # before there was any answer
            console.print()
        if chat.messages and chat.messages[-1]["role"] == "user":
            chat.messages.pop()  # it was not answered


def answer_once(chat: Conversation, prompt: str, out: TextIO) -> int:
    """Write the answer to one prompt to `out`. Return the exit status. Raise SurestepError."""

    def piece(text: str, *, reasoning: bool) -> None:
        if not reasoning:
            out.write(printable(text) if out.isatty() else text)
            out.flush()

    if not prompt.strip():
        raise InvalidRequest("no prompt: give it as an argument or on standard input")
    chat.messages.append({"role": "user", "content": prompt})
    heard = chat.answer(piece)
    if not heard.content.endswith("\n"):
        out.write("\n")
    return 0 if heard.finish_reason is not None else _INTERRUPTED


def obey(chat: Conversation, line: str, console: Console) -> bool:
    """Run a command of the user; return True when an answer is wanted. Raise InvalidRequest."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/help":
            console.print(Text(_HELP))
        case "/reset":
            chat.messages.clear()
        case "/undo" | "/retry":
            questions = [i for i, m in enumerate(chat.messages) if m["role"] == "user"]
            if not questions:
                raise InvalidRequest("nothing was asked yet")
            keep = questions[-1] + (name == "/retry")
            del chat.messages[keep:]
            return name == "/retry"
        case "/system":
            chat.system = rest or None
        case "/set":
            _set(chat.fields, rest)
        case "/show":
            console.print(Text(json.dumps(chat.body(), indent=2, ensure_ascii=False)))
        case "/save":
            _save(chat, rest)
        case _:
            raise InvalidRequest(f"no command {name}: /help lists them")
    return False


def printable(text: str) -> str:
    """Remove characters that would control a terminal: a model can emit anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _said(console: Console) -> str:
    """Read the user's input, over several lines where one ends in a backslash."""
    said = ""
    while not said.strip():
        line = input("> ")
        while line.endswith(_CONTINUES):
            line = line.removesuffix(_CONTINUES) + "\n" + input(". ")
        said = line
    return said.strip()


def _question(chat: Conversation, said: str) -> bool:
    chat.messages.append({"role": "user", "content": said})
    return True


def _show_answer(chat: Conversation, console: Console) -> None:
    """Print reasoning dim, content plain, speed below."""
    kinds: list[bool] = []

    def piece(text: str, *, reasoning: bool) -> None:
        if kinds[-1:] == [not reasoning]:
            console.print("\n")
        kinds[:] = [reasoning]
        style = "dim italic" if reasoning else ""
        console.print(Text(printable(text), style=style), end="", soft_wrap=True)

    heard = chat.answer(piece)
    console.print()
    console.print(heard.speed(), style="dim")


def _set(fields: dict[str, Any], rest: str) -> None:
    name, _, value = rest.partition(" ")
    if not name:
        raise InvalidRequest("/set NAME VALUE")
    if name not in fields and (meant := _mistyped(name)) is not None:
        raise InvalidRequest(f"no field {name}: did you mean {meant}?")
    if not value:
        fields.pop(name, None)
        return
    try:
        fields[name] = json.loads(value)
    except ValueError:
        fields[name] = value


def _mistyped(name: str) -> str | None:
    """Return the field that was meant; None for one that exists or is like none of ours."""
    from surestep_gateway.request.protocol import ChatBody

    near = difflib.get_close_matches(name, ChatBody.model_fields, n=1)
    return None if not near or name in ChatBody.model_fields else near[0]


def _save(chat: Conversation, name: str) -> None:
    if not name:
        raise InvalidRequest("/save FILE")
    try:
        Path(name).expanduser().write_text(json.dumps(chat.body()["messages"], indent=2))
    except OSError as error:
        raise InvalidRequest(f"cannot write {name}: {error.strerror}") from error


def prompt_of(words: Sequence[str], stdin: TextIO) -> str | None:
    """Return the prompt of a single answer: the words, standard input, or both."""
    said = " ".join(words)
    if stdin.isatty():
        return said or None
    piped = stdin.read()
    return f"{said}\n\n{piped}" if said and piped.strip() else said or piped


def run_chat(chat: Conversation, words: Sequence[str], console: Console) -> int:
    """Run a conversation or print one answer. Return the exit status. Raise SurestepError."""
    prompt = prompt_of(words, sys.stdin)
    if prompt is not None:
        return answer_once(chat, prompt, sys.stdout)
    return converse(chat, console)
