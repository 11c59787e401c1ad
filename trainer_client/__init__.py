"""Trainers' side of the contract, and a trainer on it.

`client` speaks the trainer plane and needs no torch; any trainer can stand on it. `loop` is ours, read top to bottom,
over `recipes` (methods), `packing` and `collate` (segments to tensors), `network`, `loss`, `checkpoint`
and `metrics`.
"""
