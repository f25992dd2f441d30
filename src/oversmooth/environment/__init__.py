"""Where the library runs: versions, threads, plugins, and libraries whose import needs help."""
