"""Every claim of the paper as a command: its protocol, what would confirm or refute it, and a run that decides."""
