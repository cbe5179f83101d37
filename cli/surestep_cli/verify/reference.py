"""Readers of texts, which tell how likely each token is: a server, or transformers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from surestep_common.errors import InvalidRequest, NotFound, Unavailable

from surestep_cli.api.http import model_card
from surestep_cli.api.sessions import get_json, open_session, post_json

from .prompts import COMPLETIONS, VerifyPrompt

TRANSFORMERS = "transformers"


class ReadToken(NamedTuple):
    """A token of a text that a model has read: its log-probability, and the best one there."""

    logprob: float
    best: float

    @property
    def regret(self) -> float:
        """By how much another token was likelier, nats."""
        return self.best - self.logprob


Reader = Callable[[Sequence[int], Sequence[int]], Coroutine[Any, Any, list[ReadToken]]]


@contextlib.asynccontextmanager
async def reader_of(
    reference: str, session: aiohttp.ClientSession, model: str
) -> AsyncIterator[Reader | None]:
    """Yield what reads texts; None for a file."""
    if reference == TRANSFORMERS:
        yield await _by_transformers(session, model)
    elif "://" in reference:
        timeout = aiohttp.ClientTimeout(total=600)
        async with open_session(reference, timeout=timeout) as other:
            name = model_card(await get_json(other, "v1/models"))["id"]
            yield reading(other, name)
    else:
        yield None


def reading(session: aiohttp.ClientSession, model: str) -> Reader:
    """Return a reader that asks a server for the log-probabilities of a prompt."""

    async def read(prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[ReadToken]:
        body = {"model": model, "prompt": [*prompt_ids, *token_ids], "temperature": 0}
        body |= {"max_tokens": 1, "prompt_logprobs": 1}
        reply = await post_json(session, COMPLETIONS, body)
        try:
            rows = reply["choices"][0]["prompt_logprobs"][len(prompt_ids) :]
            pairs = zip(rows, token_ids, strict=True)
            return [
                ReadToken(row[str(token)]["logprob"], max(e["logprob"] for e in row.values()))
                for row, token in pairs
            ]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise Unavailable("the server does not tell prompt_logprobs") from error

    return read


async def _by_transformers(session: aiohttp.ClientSession, model: str) -> Reader:
    """Return a reader that computes with transformers, in float32, from the served checkpoint."""
    folder = Path(model_card(await get_json(session, "v1/models"), model).get("root") or "")
    if not (folder / "config.json").is_file():
        raise NotFound(f"--reference transformers: the checkpoint {folder} is not on this machine")
    try:
        loaded = await asyncio.to_thread(_loaded, folder)
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise InvalidRequest(f"--reference transformers cannot load {folder}: {error}") from error

    async def read(prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[ReadToken]:
        return await asyncio.to_thread(_read, loaded, list(prompt_ids), list(token_ids))

    return read


def _loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    packed = {"gguf_file": "model.gguf"} if (folder / "model.gguf").exists() else {}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", **packed)
    return loaded.eval().requires_grad_(False)


def _read(loaded: Any, prompt_ids: list[int], token_ids: list[int]) -> list[ReadToken]:
    new = next(loaded.parameters()).new_tensor
    logits = loaded(new([prompt_ids + token_ids]).long()).logits[0, len(prompt_ids) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, new(token_ids).long()[:, None])[:, 0]
    pairs = zip(chosen.tolist(), logprobs.amax(-1).tolist(), strict=True)
    return [ReadToken(*pair) for pair in pairs]


def rows_of(path: Path) -> list[tuple[VerifyPrompt, list[int]]]:
    """Return the prompts of a reference file and their tokens. Raise InvalidRequest."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
                prompt, ids = row["prompt"], [int(token) for token in row["token_ids"]]
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidRequest(
                    f"{path.name}:{number} is no reference: an object with `prompt` and `token_ids`"
                ) from error
            rows.append(
                (VerifyPrompt(f"{path.name}:{number}", COMPLETIONS, {"prompt": prompt}), ids)
            )
    if not rows:
        raise InvalidRequest(f"{path} holds no reference")
    return rows
