"""What a model is fed: given files, built-in samples, and batches as the model takes them."""
