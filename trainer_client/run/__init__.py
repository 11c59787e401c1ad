"""A training run: `main` starts it, `loop` is the training loop, and the other files are the loop's parts."""
