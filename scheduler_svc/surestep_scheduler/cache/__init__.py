"""KV blocks, the prefix cache, and snapshots of recurrent state."""
