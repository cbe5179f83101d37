"""Lost epochs: when workers count as hung, why they were lost, and which request did it."""
