"""What clients send, and what their answers add up to."""
