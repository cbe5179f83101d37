"""The loop that sends plans and applies results, and the connections to ranks and supervisors."""
