"""What operators look at: health, metrics, status, pages, and the admin endpoint."""
