"""From recorded calls to token-faithful trajectories, and from those to datasets.

`reconstruct` and what it needs import only the standard library and numpy; `exporters` write files.
"""
