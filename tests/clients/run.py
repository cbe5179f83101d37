"""`scripts/clients`: what clients that people use see of a server, and docs/use/clients.md."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clients import page
from clients.agents.scripted import make_agents_checkpoint
from clients.checks import FAILED, LOGLIKELIHOODS, MODEL, SCORED
from clients.environments import CACHE, CannotInstallError, Client, clients, environment, variables
from clients.scripted_model import make_scripted_checkpoint, write_loglikelihoods
from support.processes.stack import Stack, serve

DOCS = sorted(page.PAGE.parent.glob("*.md"))
KEY = "the-key-of-the-clients"
FLAGS = (
    *("--api-key", KEY, "--dtype", "float32", "--max-num-seqs", "16", "--kv-cache-memory", "0.2"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--enable-sleep-mode", "--enable-weight-updates", "--admin-api-key", KEY),
)
NAMED = ("--served-model-name", MODEL, "--max-model-len", "16384")
# By the last two Codex knows models of OpenAI's, and offers them other tools.
AGENTS_NAMED = ("--served-model-name", MODEL, "gpt-5.5", "gpt-6-astra", "--max-model-len", "65536")
RUN_S = 600
# Flags by the family of the scripted model.
FAMILY_FLAGS: dict[str, tuple[str, ...]] = {
    "llama": (),
    # Beside each token's keys is its hidden state for the head, which is as wide as the vocabulary.
    "hybrid": (
        *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}'),
        *("--kv-cache-memory", "0.6"),
    ),
}


class Served(NamedTuple):
    """The server that all scripts talk to, and the folder of its model."""

    stack: Stack
    model: Path


@contextlib.contextmanager
def server(folder: Path, family: str = "llama") -> Iterator[Served]:
    """`surestep serve` with the scripted model; `folder` takes model and logs."""
    model = make_scripted_checkpoint(folder / "model", family=family)
    write_loglikelihoods(model, SCORED, LOGLIKELIHOODS)
    with serve(model, folder / "logs", *FLAGS, *NAMED, *FAMILY_FLAGS[family]) as stack:
        yield Served(stack, model)


@contextlib.contextmanager
def agents_server(folder: Path, family: str = "llama") -> Iterator[Served]:
    """The same for coding agents, whose prompts are long, with the model that calls their tools."""
    model = make_agents_checkpoint(folder / "model", [one.read_text() for one in DOCS], family)
    with serve(model, folder / "logs", *FLAGS, *AGENTS_NAMED, *FAMILY_FLAGS[family]) as stack:
        yield Served(stack, model)


def run(client: Client, served: Served, cache: Path = CACHE) -> dict[str, str]:
    """Run a client's script; returns what failed, by feature.

    Raises:
        CannotInstallError: its packages are not to be had.
    """
    made = environment(client, cache)
    with tempfile.TemporaryDirectory() as scratch:
        command = client.command(made, Path(scratch))
        command += [served.stack.url, KEY, str(served.model)]
        output, told = _output(command, Path(scratch), variables(Path(scratch), made))
    results = dict(_results(output))
    missing = dict.fromkeys(set(client.claims) - set(results), f"not run: {told[-3000:]}")
    return {feature: text for feature, text in results.items() if text is not None} | missing


def _output(command: list[str], home: Path, variables: dict[str, str]) -> tuple[str, str]:
    """Standard output and standard error."""
    process = subprocess.Popen(
        command,
        env=variables,
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        return process.communicate(timeout=RUN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def _results(output: str) -> Iterator[tuple[str, str | None]]:
    """Feature and trouble; clients may print what they like beside."""
    for line in output.splitlines():
        if line.startswith('{"feature"'):
            result: dict[str, Any] = json.loads(line)
            yield result["feature"], result["trouble"] if result["outcome"] == FAILED else None


def main() -> int:
    """Exit status: 1 if a check failed, or if --check finds the page out of date."""
    arguments = _arguments()
    if arguments.check:
        return page.check()
    chosen = [client for client in clients() if client.name in arguments.only]
    missing: dict[str, str] = {}
    failed = False
    for serving, group in ((server, False), (agents_server, True)):
        asking = [client for client in chosen if client.is_agent is group]
        if asking:
            with (
                tempfile.TemporaryDirectory() as folder,
                serving(Path(folder), arguments.model) as served,
            ):
                failed |= _run_all(asking, served, arguments.cache, missing)
    if not failed and len(chosen) == len(clients()):
        page.write(arguments.model, missing)
    return int(failed)


def _run_all(
    asking: Sequence[Client], served: Served, cache: Path, missing: dict[str, str]
) -> bool:
    """Run the scripts of some clients and print their rows; returns whether one failed."""
    failed = False
    for client in asking:
        try:
            troubles = run(client, served, cache)
        except CannotInstallError as error:
            missing[client.name] = str(error)
            troubles = {}
        failed = failed or bool(troubles)
        print(page.row(client, missing.get(client.name), troubles), flush=True)
        for feature, trouble in troubles.items():
            print(f"{client.name}, {feature}: {trouble}", file=sys.stderr)
    return failed


def _arguments() -> argparse.Namespace:
    names = [client.name for client in clients()]

    def chosen(text: str) -> list[str]:
        unknown = set(text.split(",")) - set(names)
        if unknown:
            raise argparse.ArgumentTypeError(f"no client {', '.join(unknown)}: {', '.join(names)}")
        return text.split(",")

    parser = argparse.ArgumentParser(prog="scripts/clients", description=__doc__)
    parser.add_argument("--only", type=chosen, default=names, help=f"of {','.join(names)}")
    parser.add_argument(
        "--model", choices=FAMILY_FLAGS, default="llama", help="family of the model"
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the environments")
    parser.add_argument(
        "--check", action="store_true", help="compare docs/use/clients.md, run nothing"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
