"""Clients that went without a word: a cut cable, a laptop that sleeps, a firewall that forgot.

Where nothing is on its way to a client, the kernel asks by probes whether it is there. Where something is, the kernel
sends that again for a quarter of an hour, so its own figures of the connection are looked at here: a client that is
gone acknowledges nothing, one that merely does not read still acknowledges every probe of its full window.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Final

from streamkv.log import fields

logger = logging.getLogger(__name__)

_NUM_PROBES: Final = 3
_FEWEST_RESENT: Final = 3
_FEWEST_PROBES: Final = 2
"""Unanswered ones in a row; one is always on its way for a moment."""
_LOOKS: Final = 4
"""In the time after which a silent client is gone."""
_PER_TURN: Final = 256
"""Connections that are looked at before others have their turn."""
_INFO: Final = struct.Struct("=xxBB4x48xI")
"""The head of the kernel's tcp_info: retransmits and probes without an answer, and milliseconds since the last one."""


def ask_silent_ones(listener: socket.socket, timeout_s: float) -> None:
    """Have the kernel probe idle connections, which inherit it from their listener."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(timeout_s / 2)))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(timeout_s / 2 / _NUM_PROBES)))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)


def is_gone(info: bytes, timeout_s: float) -> bool:
    """Whether a connection's peer has answered nothing for so long, though it was spoken to. info: TCP_INFO."""
    figures: tuple[int, int, int] = _INFO.unpack_from(info)
    num_resent, num_probes, silent_ms = figures
    return (num_resent >= _FEWEST_RESENT or num_probes >= _FEWEST_PROBES) and silent_ms >= 1000 * timeout_s


async def break_off_silent_ones(transports: Callable[[], Iterable[asyncio.Transport]], timeout_s: float) -> None:
    """Until cancelled: abort each connection whose client is gone, which ends its requests as any disconnect does.

    A client counts as gone at most a quarter of timeout_s late. Costs a system call for each connection at a look.
    """
    while True:
        await asyncio.sleep(timeout_s / _LOOKS)
        num_broken = 0
        for number, transport in enumerate(transports(), 1):
            connection = transport.get_extra_info("socket")
            if connection is None or transport.is_closing():
                continue
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            except OSError:
                continue  # closed just now
            if is_gone(info, timeout_s):
                num_broken += 1
                transport.abort()
            if number % _PER_TURN == 0:
                await asyncio.sleep(0)
        if num_broken:
            logger.info("broke connections off: their clients are gone", extra=fields(num_connections=num_broken))
