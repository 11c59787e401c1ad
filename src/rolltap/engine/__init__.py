"""The embedded engine: a small model server in its own process, with the token API of the real ones.

`model` is the network, `sampling` the draw, `scheduler` the loop that batches requests and swaps weights between
tokens, `protocol` the HTTP bodies, `server` the process. `tiny` makes the model that the demo trains.
"""
