"""How the suite itself is run: plugins of pytest."""
