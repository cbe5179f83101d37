"""The prefix cache: full blocks of committed tokens, found by chained hashes.

    key[0] = H(salt)        key[i+1] = H(key[i], tokens[i*block_size : (i+1)*block_size])

A key therefore names the whole prefix up to and including its block. The salt keeps tenants apart.
Where what is computed of a token depends on more than the tokens before it, the key names that too:
how many leading tokens went in chunks, in the keys of blocks that reach beyond them. And where a
drafter's row of a position, which lies in the block too, is made of the token behind it, the key
of a block names the first token behind the block: the row of its last position is right for every
request that finds it.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from .blocks import BlockPool


class PrefixChain:
    """Keys of the full blocks of one growing token list, computed once each."""

    def __init__(
        self, salt: str, block_size: int, shared_len: int, *, names_next: bool = False
    ) -> None:
        """`names_next`: a key names the token behind its block."""
        self._block_size, self._shared_len = block_size, shared_len  # see Limits.shared_len
        self._ahead = int(names_next)
        self._keys = [blake2b(salt.encode(), digest_size=16).digest()]

    def extend(self, tokens: array[int]) -> None:
        """Compute the keys of all full blocks of `tokens` now, rather than when they are needed."""
        self.keys(tokens, 0, self.count(tokens))

    def count(self, tokens: array[int]) -> int:
        """Return how many leading blocks of `tokens` have keys."""
        return max(0, len(tokens) - self._ahead) // self._block_size

    def keys(self, tokens: array[int], since: int, upto: int) -> list[bytes]:
        """Return the keys of blocks since..upto-1; `tokens` must hold them and never change."""
        size, keys = self._block_size, self._keys
        assert upto <= self.count(tokens)
        for start in range((len(keys) - 1) * size, upto * size, size):
            content = tokens[start : start + size + self._ahead].tobytes()
            if start + size > self._shared_len:
                content += self._shared_len.to_bytes(8)
            keys.append(blake2b(keys[-1] + content, digest_size=16).digest())
        return keys[since + 1 : upto + 1]


def match(pool: BlockPool, chain: PrefixChain, tokens: array[int], block_size: int) -> list[int]:
    """Return blocks that hold a prefix of `tokens` already, leaving a token or more to compute."""
    return pool.leading(chain.keys(tokens, 0, (len(tokens) - 1) // block_size))


def publish(
    pool: BlockPool,
    chain: PrefixChain,
    tokens: array[int],
    blocks: list[int],
    since: int,
    upto: int,
) -> None:
    """Make blocks[since:upto], all of them full of committed tokens, findable."""
    upto = max(since, min(upto, chain.count(tokens)))
    for index, key in enumerate(chain.keys(tokens, since, upto), since):
        pool.publish(blocks[index], key)
