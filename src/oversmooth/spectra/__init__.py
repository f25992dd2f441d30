"""Weights -> eigenvalues: the value map, its spectrum, and `inspect`."""
