"""Clients on bare sockets: that read when they are told to, and that go as real ones do."""

import asyncio
import ctypes
import json
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from tests.support.running_gateway import Events

SO_ATTACH_FILTER = 26
"""Linux's number, which the socket module does not have."""


class RawClient:
    """One connection. Nothing is read but by `read` and `read_all`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    @classmethod
    async def connect(cls, url: str, receive_bytes: int = 0) -> "RawClient":
        """receive_bytes: of its receive buffer, 0: as the kernel has it."""
        host, port = url.removeprefix("http://").split(":")
        connection = socket.socket()
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        return cls(connection)

    async def post(self, path: str, body: Mapping[str, object], *headers: str) -> None:
        data = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", "Content-Type: application/json", *headers]
        head = "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode()
        await self.send(head + data)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.connection, data)

    async def read(self, num_bytes: int = 65536) -> bytes:
        """What is there, or comes next; empty at the end."""
        return await asyncio.get_running_loop().sock_recv(self.connection, num_bytes)

    async def read_all(self) -> bytes:
        """Until the other side closes."""
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    # How clients go

    def finish(self) -> None:
        """FIN, and nothing is unread that would make it a reset."""
        self.connection.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """RST."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def fall_silent(self) -> None:
        """As if the cable were cut: its kernel drops every packet unseen, so nothing is acknowledged."""
        drop_all = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0 bytes of the packet
        program = ctypes.create_string_buffer(drop_all)
        self.connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))

    def close(self) -> None:
        self.connection.close()


def body_of(raw: bytes) -> bytes:
    """An answer's bytes → its body, out of its chunks."""
    head, _, left = raw.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return left
    found = []
    while left:
        size, _, left = left.partition(b"\r\n")
        if int(size, 16) == 0:
            break
        found.append(left[: int(size, 16)])
        left = left[int(size, 16) + 2 :]
    return b"".join(found)


def events_of(raw: bytes) -> Events:
    """The events of a whole SSE answer."""
    status = int(raw.split(b" ", 2)[1])
    return Events(status, {}, body_of(raw))


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
