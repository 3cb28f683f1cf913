"""Passes over data without an update: `evaluate` and `predict`."""
