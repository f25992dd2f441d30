"""For Lightning: `from oversmooth.lightning import SmoothingCallback`."""

from oversmooth.training.lightning_callback import SmoothingCallback

__all__ = ["SmoothingCallback"]
