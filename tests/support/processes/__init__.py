"""The product's own processes, and what a test needs around them."""
