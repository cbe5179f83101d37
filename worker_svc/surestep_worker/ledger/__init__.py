"""What the scheduler and a rank both know: plans, slots, and the checks between them."""
