"""Code that the implementations of all ops in a language share."""
