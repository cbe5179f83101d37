"""What keeps a step on its device, in torch: drafts, inputs, choice, commit, report."""
