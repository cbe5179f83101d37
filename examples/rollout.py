"""Teach a model by its own samples, which a server with speculation makes.

    python examples/rollout.py FOLDER --make
    surestep serve FOLDER --dtype float32 --enable-weight-updates --admin-api-key secret
    python examples/rollout.py FOLDER --admin-api-key secret --kill-every 3

Each update samples groups of answers at temperature 1, rewards the share of vowels in each, takes a
step of group relative policy optimization (arXiv 2402.03300, without its penalty and clipping: each
sample is used once), and sends the new weights to the server. The random model that `--make` makes
begins at 4 % of vowels. Samples depend on seeds, prompts and weights alone, so `--kill-every 3`,
which kills a rank of the server in every third update, and drafts change no reward.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TokenizersBackend

_VOWELS = frozenset(map(ord, "aeiouAEIOU"))  # tokens are bytes
_PROMPTS = tuple(list(f"{word}: ".encode()) for word in ("sing", "hum", "call", "shout"))
_RATE = 3e-3  # of learning


class Samples(NamedTuple):
    """Answers of a batch, those to one prompt one after the other."""

    ids: Tensor  # i64[B, P + N], filled up with zeros in front
    logprobs: Tensor  # f32[B, N] of the answers' tokens, by the server
    accepted: int  # tokens that were drafts
    killed: int | None  # process of the rank that died meanwhile


class Server:
    """A server that samples, and is sent weights."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url.rstrip("/"), key

    def _call(self, path: str, data: bytes | None, kind: str = "application/json") -> Any:
        headers = {"authorization": f"Bearer {self._key}", "content-type": kind}
        request = urllib.request.Request(self._url + path, data, headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def sample(self, prompt: list[int], group: int, length: int, seed: int) -> list[Any]:
        """Return the choices of a group."""
        body = {
            "prompt": prompt,
            "n": group,
            "seed": seed,
            "max_tokens": length,
            "temperature": 1,
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "speculative": {"return_drafted": True},
        }
        choices: list[Any] = self._call("/v1/completions", json.dumps(body).encode())["choices"]
        return choices

    def load(self, tensors: dict[str, Tensor], version: str) -> None:
        """Have everything that is sampled from here on come from these weights."""
        path = f"/update_weights_from_tensor?weight_version={version}"
        self._call(path, save(tensors), "application/octet-stream")

    def kill_a_rank(self) -> int:
        """Kill the first one on this machine; return its process."""
        (scheduler,) = self._call("/status", None)["schedulers"]
        pid = int(scheduler["status"]["supervisors"][0]["rank_pid"])
        os.kill(pid, signal.SIGKILL)
        return pid


def make(folder: Path) -> None:
    """Write a small random model whose tokens are bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    # Every byte is a token whose id it is, by the letter that stands for it.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_byte = {_byte_of(letter): letter for letter in letters}
    vocabulary = {letter: byte for byte, letter in of_byte.items()} | {"<end>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    TokenizersBackend(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def _byte_of(letter: str) -> int:
    """Return the byte that a letter of the alphabet of byte-level tokenizers stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return ord(letter) if ord(letter) < 256 else others[ord(letter) - 256]


def sample(server: Server, update: int, args: argparse.Namespace) -> Samples:
    """Sample a group for each prompt at once; in some updates a rank dies meanwhile."""
    kills, killed = args.kill_every and update % args.kill_every == 0, None
    with ThreadPoolExecutor(len(_PROMPTS)) as pool:
        calls = {
            pool.submit(server.sample, prompt, args.group, args.length, 1000 * update + i): i
            for i, prompt in enumerate(_PROMPTS)
        }
        if kills:
            time.sleep(args.kill_after_s)
            killed = server.kill_a_rank()
        groups = {calls[call]: call.result() for call in as_completed(calls)}
    width = max(map(len, _PROMPTS))
    ids, logprobs, accepted = [], [], 0
    for i, prompt in enumerate(_PROMPTS):
        for choice in groups[i]:
            ids.append([0] * (width - len(prompt)) + prompt + choice["token_ids"])
            logprobs.append(choice["logprobs"]["token_logprobs"])
            accepted += sum(choice.get("drafted") or [])
    return Samples(torch.tensor(ids), torch.tensor(logprobs), accepted, killed)


def rewards_of(ids: Tensor) -> Tensor:
    """Return the share of vowels in answers [B, N], f32[B]."""
    return torch.isin(ids, torch.tensor(sorted(_VOWELS))).float().mean(dim=1)


def learn(model: Any, optimizer: torch.optim.Optimizer, samples: Samples, group: int) -> float:
    """Take a step; return by how much the server's log-probabilities differ at most."""
    length = samples.logprobs.shape[1]
    mask = torch.ones_like(samples.ids)
    for row, prompt in enumerate(prompt for prompt in _PROMPTS for _ in range(group)):
        mask[row, : samples.ids.shape[1] - length - len(prompt)] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(samples.ids, attention_mask=mask, position_ids=positions).logits
    chosen = samples.ids[:, -length:, None]
    logprobs = logits[:, -length - 1 : -1].log_softmax(-1).gather(2, chosen)[..., 0]
    reward = rewards_of(samples.ids[:, -length:]).view(-1, group)
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    optimizer.zero_grad()
    loss = -(advantage.view(-1, 1) * logprobs).mean()
    loss.backward()
    optimizer.step()
    return float((logprobs.detach() - samples.logprobs).abs().max())


def train(args: argparse.Namespace) -> None:
    """Print a line of JSON for each update."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    server = Server(args.url, args.admin_api_key)
    for update in range(1, args.updates + 1):
        began = time.monotonic()
        samples = sample(server, update, args)
        sampled_s = time.monotonic() - began
        difference = learn(model, optimizer, samples, args.group)
        server.load(dict(model.state_dict()), f"update-{update}")
        told = {
            "update": update,
            "reward": round(float(rewards_of(samples.ids[:, -args.length :]).mean()), 4),
            "difference": difference,
            "drafts_accepted": samples.accepted,
            "killed": samples.killed,
            "sampled_s": round(sampled_s, 2),
        }
        print(json.dumps(told), flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="of the model that the server serves, too")
    add("--make", action="store_true", help="write a small random model there, and no more")
    add("--url", default="http://127.0.0.1:8000")
    add("--admin-api-key", default="")
    add("--updates", type=int, default=20)
    add("--group", type=int, default=8, help="answers to a prompt")
    add("--length", type=int, default=48, help="tokens of an answer")
    add("--kill-every", type=int, default=0, help="updates; 0 = none is killed")
    add("--kill-after-s", type=float, default=0.1, help="the samples were asked for")
    return parser.parse_args(argv)


def main() -> int:
    """Make a model, or teach it."""
    args = parse()
    (make(args.folder) if args.make else train(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
