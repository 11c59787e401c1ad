"""Reconstructs token-faithful trajectories from recorded calls, and exports them as datasets.

`reconstruct` and what it needs import only the standard library and numpy; `exporters` write files.
"""
