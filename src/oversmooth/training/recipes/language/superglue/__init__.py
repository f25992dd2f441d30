"""SuperGLUE: eight tasks and two diagnostic sets, in the official formats, with the official metrics."""
