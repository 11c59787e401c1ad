"""A training run: `main` starts it, `loop` is it, read top to bottom; the other files are the loop's parts."""
