"""Trainers' side of the contract, and a trainer on it.

`lease` speaks the trainer plane; its client needs no torch, and any trainer can stand on it. Our trainer is `run` over
`data` (leased groups to tensors), `model` (network, loss, optimiser, weights) and `recipes` (methods). `adapters` feed
other trainers, and `endpoint` is a service with Tinker's API over our trainer; nothing else imports these two.
"""
