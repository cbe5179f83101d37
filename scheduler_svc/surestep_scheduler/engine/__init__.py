"""The loop that sends plans and applies results, the connections, and epochs that were lost."""
