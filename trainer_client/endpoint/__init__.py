"""Our trainer behind Tinker's HTTP API: what the `tinker` SDK talks to instead of Thinking Machines' own service.

`app.py` has the routes, `sessions.py` who is connected, `lanes.py` the order of a model's requests and what became of
them, `model.py` a model in training, `samplers.py` sampling from saved weights, `saved.py` what is on disk.
"""
