"""Tiers behind the KV blocks of a rank: what they hold, and what moves between them and blocks."""
