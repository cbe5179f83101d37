"""Choose numbers of drafts, and suspend speculation that does not pay."""
