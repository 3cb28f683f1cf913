"""What is known of updates that were sent: their numbers, what became of them, and why."""
