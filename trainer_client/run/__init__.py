"""A training run: `loop` starts it and is the training loop, and the other files are the loop's parts."""
