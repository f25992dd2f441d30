"""What the theory says of each layer beside the measurement: `predict`."""
