"""Results on the terminal: tables and progress bars."""
