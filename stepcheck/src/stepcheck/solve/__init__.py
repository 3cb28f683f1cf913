"""Which errors make a gradient: solved for in each update."""
