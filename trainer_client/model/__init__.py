"""The model in training: network, loss, optimiser, ranks, and its weights and checkpoints on disk."""
