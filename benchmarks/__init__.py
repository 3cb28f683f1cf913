"""
How fast, how soon and how large, side by side with `keras.Model.fit` in one run: `python -m
benchmarks`.

The parent process (`__main__`, `suite`, `children`, `table`) imports nothing of Keras: a backend is
fixed per process, and a child's peak memory starts from its parent's. Everything else runs in
children, one at a time.
"""
