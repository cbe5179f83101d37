"""The endpoints, by topic, and the middleware around them."""
