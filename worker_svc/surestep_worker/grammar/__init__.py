"""Grammars: which tokens a request may emit next. Only rank 0, which chooses, follows them."""
