"""The planes that a server listens on: model calls (`agent`), and the routes of the trainer and admin planes."""
