"""One plugin of every kind for oversmooth; `pyproject.toml` says which object adds what."""
