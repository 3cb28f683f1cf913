"""Several updates in one dispatch: their number, their program, and sending them ahead of requests."""
