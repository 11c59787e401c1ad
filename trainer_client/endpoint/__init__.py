"""A service with Tinker's HTTP API over our trainer. The `tinker` SDK uses it in place of Thinking Machines' service.

`app.py` builds the application from `routes.py`. `sessions.py` holds the clients' sessions, `lanes.py`
the order of a model's requests and their results, `model.py` a model in training, `samplers.py` the engines that sample
from saved weights, `saved.py` the files on disk.
"""
