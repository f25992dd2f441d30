"""Models that train: the monitor, the recipes, and the paper's claims."""
