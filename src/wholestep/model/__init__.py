"""The user's Keras model: its construction, its preprocessing, its calls, and the coupling of its rows."""
