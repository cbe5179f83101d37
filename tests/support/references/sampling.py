"""The sampling pipeline written down a second time: one row, plain Python, double precision.

Nothing here is shared with the product. Tests compare the two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from surestep_proto import sampling_pb2 as pb

NEVER = -math.inf
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1


def params(**given: object) -> pb.SamplingParams:
    """SamplingParams with neutral defaults. `bad_words` is given as lists of ids."""
    bad_words = given.pop("bad_words", ())
    neutral: dict[str, object] = {"top_p": 1.0, "repetition_penalty": 1.0, "seed": 1}
    message = pb.SamplingParams(**(neutral | given))  # type: ignore[arg-type]
    for word in bad_words:  # type: ignore[attr-defined]
        message.bad_words.add(token_ids=word)
    return message


def _mix64(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _U64
    return x ^ x >> 31


def _mix32(x: int, key: int = 0) -> int:
    x = ((x ^ x >> 16) * 0x7FEB352D & _U32) ^ key
    x = (x ^ x >> 15) * 0x846CA68B & _U32
    return x ^ x >> 16


def uniform(seed: int, position: int, token_id: int) -> float:
    """The uniform number behind a noise value, on the open (0, 1)."""
    key = _mix64((seed + 0x5375726553746570) & _U64)
    key = _mix64((key + position * 0x9E3779B97F4A7C15) & _U64)
    stage = _mix32((token_id + 0x9E3779B9) & _U32)
    h = _mix32(stage ^ (key & _U32), key >> 32)
    return (((h + (1 << 31)) & _U32) + 0.5) / (1 << 32)


def gumbel(seed: int, position: int, token_id: int) -> float:
    """Noise of a token, in double precision."""
    return -math.log(-math.log(uniform(seed, position, token_id)))


def shape(
    logits: Sequence[float], history: Sequence[int], prompt_len: int, p: pb.SamplingParams
) -> list[float]:
    """Logits after bias, min_tokens, penalties and bad words."""
    z = list(logits)
    output = list(history[prompt_len:])
    if p.allowed_token_ids:
        z = [x if i in p.allowed_token_ids else NEVER for i, x in enumerate(z)]
    for token_id, bias in p.logit_bias.items():
        z[token_id] += bias
    if len(output) < p.min_tokens:
        for token_id in p.stop_token_ids:
            z[token_id] = NEVER
    for token_id in set(history):
        z[token_id] *= p.repetition_penalty if z[token_id] <= 0 else 1 / p.repetition_penalty
    for token_id, count in Counter(output).items():
        z[token_id] -= p.frequency_penalty * count + p.presence_penalty
    for word in p.bad_words:
        *prefix, last = word.token_ids
        if len(prefix) <= len(output) and output[len(output) - len(prefix) :] == prefix:
            z[last] = NEVER
    return z


def heat(z: Sequence[float], temperature: float) -> list[float]:
    """Logits over temperature, the best at 0: a constant changes nothing, but may overflow."""
    peak = max(z)
    return [(x - peak) / temperature for x in z]


def candidates(z: Sequence[float], p: pb.SamplingParams) -> list[int]:
    """Ids that may be drawn from logits z (temperature applied), best first."""
    order = sorted((i for i in range(len(z)) if z[i] > NEVER), key=lambda i: (-z[i], i))
    peak = z[order[0]]
    if p.min_p > 0:
        order = [i for i in order if math.exp(z[i] - peak) >= p.min_p]
    if p.top_k > 0:
        order = order[: p.top_k]
    total = math.fsum(math.exp(z[i] - peak) for i in order)
    kept, mass = [], 0.0
    for i in order:
        if p.top_p < 1 and mass >= p.top_p * total:
            break
        kept.append(i)
        mass += math.exp(z[i] - peak)
    return kept


def distribution(z: Sequence[float], p: pb.SamplingParams) -> list[float]:
    """Exact probabilities of drawing each id from shaped logits z."""
    hot = heat(z, p.temperature)
    kept = candidates(hot, p)
    weight = {i: math.exp(hot[i]) for i in kept}
    total = math.fsum(weight.values())
    return [weight.get(i, 0.0) / total for i in range(len(z))]


def choose(
    logits: Sequence[float], history: Sequence[int], prompt_len: int, p: pb.SamplingParams
) -> int:
    """The token at index len(history)."""
    z = shape(logits, history, prompt_len, p)
    if p.temperature == 0:
        return max(range(len(z)), key=lambda i: (z[i], -i))
    hot = heat(z, p.temperature)
    return max(candidates(hot, p), key=lambda i: (hot[i] + gumbel(p.seed, len(history), i), -i))
