"""Findings, and how they look."""
