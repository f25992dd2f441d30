"""Features -> numbers: the metrics, and `measure`."""
