"""The stages of an update, judged one after another."""
