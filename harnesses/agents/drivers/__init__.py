"""Scripts that run agent libraries as commands, by the library's own Python, outside this package."""
