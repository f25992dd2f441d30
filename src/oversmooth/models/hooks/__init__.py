"""Where a running model is watched: places of the residual stream, attention maps."""
