"""The command: a script runs, watched."""
