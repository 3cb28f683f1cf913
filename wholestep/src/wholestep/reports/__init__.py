"""Reports of the updates that were sent: their numbers, their outcome, and diagnoses."""
