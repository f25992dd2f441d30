"""Where the library runs: versions, threads, and a torchvision that can be imported."""
