"""Gather a step's inputs from the slots."""

from __future__ import annotations

from .reference import GatherStep, StepInputs, gather_step_reference

__all__ = ["GatherStep", "StepInputs", "gather_step_reference"]
