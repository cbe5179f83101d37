"""What scheduler and rank both know: plans, slots, and the checks between them."""
