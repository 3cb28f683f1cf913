"""Several updates in one dispatch: how many, in which program, and before somebody asked for them."""
