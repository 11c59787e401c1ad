"""The trainers' side of rolltap: a client of the trainer plane, and a trainer that uses it.

`lease` holds the client. It needs no torch, so any trainer can use it. Our trainer is `run` (the loop), with `data`
(leased groups to tensors), `model` (network, loss, optimiser, weights) and `recipes` (methods). `adapters` feed other
trainers, and `endpoint` serves Tinker's API with our trainer; nothing else imports these two.
"""
