"""The port: bound alone, or together with the other gateways of one server."""

import socket


def bind(host: str, port: int, shares_port: bool = False) -> socket.socket:
    """A socket for this address that does not yet listen. Raises OSError.

    shares_port: others may bind it who ask for the same (SO_REUSEPORT); connections are dealt out among those that
    listen.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares_port:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


def reserve(host: str, port: int) -> socket.socket:
    """Hold an address for gateways that will share it: the socket never listens. Raises OSError when anybody listens
    there, also another server that shares it among its own."""
    bind(host, port).close()
    return bind(host, port, shares_port=True)


def url_of(bound: socket.socket) -> str:
    """Where to reach it from this machine."""
    address, port = bound.getsockname()[:2]
    shown = "127.0.0.1" if address in ("0.0.0.0", "::") else address
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
