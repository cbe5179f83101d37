"""Torch references of the ops that keep a step on its device: inputs, choice, commit, report."""
