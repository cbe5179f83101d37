"""Choose the positions that a token attends to in latent attention."""
