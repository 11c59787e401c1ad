"""Connections whose other end is gone without a word: a machine that lost its power, a firewall that forgot it."""

from __future__ import annotations

import socket

DEAD_AFTER_S = 20
"""A machine that acknowledges nothing for so long is gone. Without a limit the kernel waits for minutes to hours."""


def notice_death(connected: socket.socket) -> None:
    """The kernel ends the connection if the other machine acknowledges nothing for `DEAD_AFTER_S`, data or probes."""
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": DEAD_AFTER_S * 1000}
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:  # macOS lacks some
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
