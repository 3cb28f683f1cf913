"""Keras: the hooks, the reference, and the listeners of both engines."""
