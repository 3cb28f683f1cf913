"""Looking at data without an update: `evaluate` and `predict`."""
