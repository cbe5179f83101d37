"""Meaning of --quantization: rounding, or the form that the checkpoint has already.

It is read without torch, since `surestep serve` refuses before anything starts.
"""

from __future__ import annotations

from surestep_common.errors import InvalidRequest

_ON = {"cpu": ("int8", "int4", "fp8"), "cuda": ("fp8",)}  # what weights are rounded to
_OTHER_NAMES = {  # vLLM's, of other kernels and contents
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "auto_round": "auto-round",
    "inc": "auto-round",
    **dict.fromkeys(("modelopt_fp4", "modelopt_mixed"), "modelopt"),
}


def rounding_wanted(wanted: str | None, held: str | None, device: str) -> str | None:
    """Return what the weights of a checkpoint are to be rounded to while they are loaded.

    None: they are served as they are stored, quantised by `held`, if at all. Raises InvalidRequest
    for what is neither held nor possible.
    """
    if wanted is None or _plain_name(wanted) == held:
        return None
    if held is not None:
        check_held(wanted, held)
    rounded = _ON[device]
    if wanted not in rounded:
        names = ", ".join(rounded)
        raise _refusal(wanted, held, f"on {device} it can be rounded while it is loaded to {names}")
    return wanted


def check_held(wanted: str, held: str | None) -> None:
    """Raise InvalidRequest unless a checkpoint quantised by `held` is what is wanted."""
    if _plain_name(wanted) != held:
        raise _refusal(wanted, held, "it is served as it is stored")


def _plain_name(wanted: str) -> str:
    return _OTHER_NAMES.get(wanted, wanted)


def _refusal(wanted: str, held: str | None, but: str) -> InvalidRequest:
    state = f"quantised by {held!r}" if held else "not quantised"
    message = f"--quantization {wanted}: the checkpoint is {state}, and {but}"
    return InvalidRequest(message, param="quantization")
