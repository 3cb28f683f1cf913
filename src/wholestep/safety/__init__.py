"""Guards: no trainer is used twice at once, no interrupt leaves half an update, no failure goes untold."""
