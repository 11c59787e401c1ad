"""A name server of a soak's own, and how a process comes to ask it: a mount namespace with another resolv.conf."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

DOMAIN = "soak.internal"
HEADER = struct.Struct("!6H")
SERVFAIL, NXDOMAIN = 2, 3
TTL_S = 1
AS_SEEN_THROUGH = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'


@dataclass(eq=False)
class NameServer(asyncio.DatagramProtocol):
    """Every name of `DOMAIN` is 127.0.0.1. With a `fault` it says nothing ("silent"), or an error."""

    address: str
    fault: str = ""

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        number, flags, *_ = HEADER.unpack_from(data)
        end = data.index(0, HEADER.size) + 5
        question = data[HEADER.size : end]
        is_ours = b"\x04soak\x08internal\x00" in question
        code = {"servfail": SERVFAIL, "nxdomain": NXDOMAIN}.get(self.fault, 0 if is_ours else NXDOMAIN)
        answers = int(code == 0 and question[-4:-2] == b"\0\x01")  # an A record; of IPv6 there is none
        reply = HEADER.pack(number, 0x8180 | flags & 0x0100 | code, 1, answers, 0, 0) + question
        if answers:
            reply += struct.pack("!HHHIH", 0xC00C, 1, 1, TTL_S, 4) + socket.inet_aton("127.0.0.1")
        if self.fault != "silent":
            self._transport.sendto(reply, addr)

    def configuration(self, folder: Path) -> Path:
        path = folder / "resolv.conf"
        path.write_text(f"nameserver {self.address}\n")
        path.chmod(0o644)
        return path


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    """On port 53 of a loopback address of its own, as resolv.conf has no ports. Only root may take it."""
    address = f"127.77.{random.randint(1, 254)}.{random.randint(1, 254)}"
    server = NameServer(address)
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: server, local_addr=(address, 53))
    try:
        yield server
    finally:
        transport.close()


def asking(configuration: Path, command: list[str]) -> list[str]:
    """The command in a mount namespace of its own, in which names are asked of another server."""
    return ["unshare", "--mount", "sh", "-c", AS_SEEN_THROUGH, str(configuration), *command]
