"""Finds the value path of an undeclared model by running it and watching every operation."""
