"""The record of a loop, cut into updates."""
