"""`python -m oversmooth`."""

from oversmooth.cli import main

main()
