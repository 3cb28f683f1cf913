"""Several processes of one run: started, compared, and ended together."""
