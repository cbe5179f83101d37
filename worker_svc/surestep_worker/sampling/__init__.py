"""What is told of the tokens that a step chooses."""
