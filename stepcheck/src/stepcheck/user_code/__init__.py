"""The lines of the user's code."""
