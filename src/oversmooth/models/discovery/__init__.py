"""Finding the value path of a model that nobody declared, by running it once and watching every operation."""
