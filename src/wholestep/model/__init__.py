"""A Keras model as the user gives it: how it is built, prepared for, called, and what couples its rows."""
