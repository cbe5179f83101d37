"""Choose one token per position: the greatest logit, or a draw.

`gumbel.py` has the noise and `mass.py` the whole numbers in which top-p measures. In Triton,
`triton.py` draws from all tokens and `nucleus.py` from those that top-k, top-p and min_p admit.
"""

from __future__ import annotations

from .gumbel import gumbel_noise
from .mass import mass_of
from .reference import SATURATED, Choose, Chosen, DrawParams, RowStatus, choose_reference

__all__ = [
    "SATURATED",
    "Choose",
    "Chosen",
    "DrawParams",
    "RowStatus",
    "choose_reference",
    "gumbel_noise",
    "mass_of",
]
