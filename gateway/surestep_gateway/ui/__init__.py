"""The status page and the other pages for people."""
