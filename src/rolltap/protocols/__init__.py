"""Wire protocols: what clients and vendors send and read, typed. Below the proxy: nothing here imports it.

`conversation` is the common form of requests and replies, `base` the Protocol of a dialect, `dialects` their registry.
A protocol is a package: `wire` (types), `dialect` (the dialect's class, and the head of a request), `parse` (its
history), `write` (replies to clients, and errors) and `read` (a vendor's replies). They share `requests`, `replies`,
`contents`, `thinking`, `hints` and `history`. `handles` are the ids that clients send back. `cache_space` and
`request_cache` make repeated histories cheap.
"""
