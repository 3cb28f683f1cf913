"""Taking a run out of a process, and putting it back into another."""
