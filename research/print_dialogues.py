"""Prints dialogues of the patterns that the tiny hybrid has learnt, as text for benchmarks.

python tools/print_dialogues.py tests/data/tiny-hybrid > dialogues.txt
"""

from __future__ import annotations

import random
import sys

from tiny_hybrid.corpus import prompt
from tiny_hybrid.dialogues import PATTERNS
from transformers import AutoTokenizer, TokenizersBackend

SEED = 5
COUNT = 400


def main() -> None:
    """Every pattern in turn."""
    tokenizer, rng = AutoTokenizer.from_pretrained(sys.argv[1]), random.Random(SEED)
    assert isinstance(tokenizer, TokenizersBackend)
    for index in range(COUNT):
        dialogue = PATTERNS[index % len(PATTERNS)](rng)
        sys.stdout.write(f"{prompt(tokenizer, dialogue)}{dialogue.completion}<|im_end|>\n")


if __name__ == "__main__":
    main()
