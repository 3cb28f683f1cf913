"""Embedding tables: an update looks at few rows of them, and touches only those."""
