"""The APIs, one folder each, and what their routes share."""
