"""ZeroMQ sockets between gateway and engine: endpoints, keys, frames. Knows no message.

The engine binds a ROUTER, each gateway connects a DEALER whose routing id is its gateway id. Neither has a
high-water mark, so ZeroMQ drops nothing by itself; what bounds memory is the engine's rule on unacknowledged bytes.
What ends with a connection (queued frames of a dead peer) is told by `GatewaySocket`'s callbacks and by
`EngineSocket.send` returning False.
"""

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import os
import secrets
import socket as posix_socket
import stat
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from streamkv.errors import ConfigError

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
"""Larger frames are never sent; a peer that sends one is disconnected by ZeroMQ before it is read into memory."""
MAX_IPC_PATH_BYTES: Final = 107
"""sockaddr_un.sun_path without its final zero."""

_LINGER_MS: Final = 1000
_TCP_PROBE_MS: Final = 5000
_TCP_PROBE_TIMEOUT_MS: Final = 15000
_DRAIN_BUDGET_S: Final = 0.004
_KEY_CHARS: Final = 40


# Endpoints


def new_gateway_id() -> bytes:
    """16 random bytes that may serve as a routing id: ZeroMQ keeps those that begin with a zero byte for itself."""
    return bytes([secrets.randbelow(255) + 1]) + secrets.token_bytes(15)


def default_endpoint(name: str = "engine") -> str:
    """`ipc://` address of the socket `name` in a folder that only this user can enter; makes the folder.

    Raises ConfigError when the folder belongs to somebody else, is a link, is open to others, or has too long a path.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime, "streamkv") if runtime and _is_private_folder(Path(runtime)) else None
    if folder is None or len(os.fsencode(folder / f"{name}.sock")) > MAX_IPC_PATH_BYTES:
        folder = Path("/tmp", f"streamkv-{os.geteuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError("endpoint", f"cannot make the folder {folder} for the engine's socket: {error}") from error
    if not _is_private_folder(folder):
        raise ConfigError(
            "endpoint",
            f"{folder} must be a folder of this user that nobody else can enter (mode 0700, no link); "
            "remove it, or set --endpoint to ipc:// and a path of your own",
        )
    endpoint = f"ipc://{folder / name}.sock"
    check_endpoint(endpoint, has_keys=False)
    return endpoint


def flight_record_path(endpoint: str) -> str:
    """The file in which the engine at an endpoint leaves what it computes (engine/flight_record.py): beside an ipc
    socket; for tcp, which has a port, in the folder of this user. Raises ConfigError."""
    scheme, _, address = endpoint.partition("://")
    if scheme != "ipc":
        address = default_endpoint(f"tcp-{address.rpartition(':')[2]}").removeprefix("ipc://")
    return address + ".flight"


def _is_private_folder(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def check_endpoint(endpoint: str, has_keys: bool) -> None:
    """Raises ConfigError unless the endpoint is `ipc://path` or `tcp://host:port`, and safe without keys if there
    are none: whoever reaches an engine may run it and read its streams."""
    scheme, separator, address = endpoint.partition("://")
    if not separator or scheme not in ("ipc", "tcp"):
        raise ConfigError("endpoint", f"must be ipc://PATH or tcp://HOST:PORT, got {endpoint!r}")
    if scheme == "ipc":
        size = len(os.fsencode(address))
        if not address or address.startswith("@"):
            raise ConfigError("endpoint", f"needs a path in the file system after ipc://, got {endpoint!r}")
        if "\0" in address or size > MAX_IPC_PATH_BYTES:
            raise ConfigError(
                "endpoint", f"an ipc path may have {MAX_IPC_PATH_BYTES} bytes, this one has {size}: {endpoint!r}"
            )
        return
    host, separator, port = address.rpartition(":")
    if not separator or not host or not (port == "*" or (port.isascii() and port.isdigit() and int(port) <= 65535)):
        raise ConfigError("endpoint", f"must be tcp://HOST:PORT, got {endpoint!r}")
    if not has_keys and not _is_loopback(host):
        raise ConfigError(
            "endpoint",
            f"{endpoint!r} can be reached from other machines, so it needs CURVE keys (curve_secret_key_file, and on "
            "the gateway curve_server_key; `streamkv keygen FILE` makes them); or use 127.0.0.1 or ipc://",
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# Keys


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One side's key pair in Z85 (40 characters), and on a gateway the engine's public key.

    The engine takes every client that knows its public key: hand that key only to your gateways, over a channel you
    trust, and make a new pair when it leaks.
    """

    public: bytes
    secret: bytes
    server_public: bytes = b""

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"


def write_curve_keys(secret_key_file: Path) -> bytes:
    """Make a key pair: the secret key goes to a new file that only its owner can read. Returns the public key.

    Raises ConfigError when the file exists or cannot be written.
    """
    public, secret = zmq.curve_keypair()
    try:
        descriptor = os.open(secret_key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret + b"\n")
    except OSError as error:
        raise ConfigError("curve_secret_key_file", f"cannot write {secret_key_file}: {error}") from error
    return bytes(public)


def load_curve_keys(secret_key_file: str, server_key: str = "") -> CurveKeys | None:
    """The keys that the settings name; None when they name none. With `server_key` alone (a gateway), a fresh pair.

    Raises ConfigError for a file that others can read, or that holds no key.
    """
    if not secret_key_file and not server_key:
        return None
    server_public = server_key.encode()
    if server_key and not _is_key(server_public):
        raise ConfigError("curve_server_key", f"must be {_KEY_CHARS} characters of Z85, got {len(server_key)}")
    if not secret_key_file:
        public, secret = zmq.curve_keypair()
        return CurveKeys(bytes(public), bytes(secret), server_public)
    try:
        with open(secret_key_file, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(256).strip()
    except OSError as error:
        raise ConfigError("curve_secret_key_file", f"cannot read {secret_key_file}: {error}") from error
    if mode & 0o077:
        raise ConfigError("curve_secret_key_file", f"{secret_key_file} can be read by others; run chmod 600 on it")
    if not _is_key(secret):
        raise ConfigError("curve_secret_key_file", f"{secret_key_file} must hold one key of {_KEY_CHARS} characters")
    return CurveKeys(bytes(zmq.curve_public(secret)), secret, server_public)


def _is_key(key: bytes) -> bool:
    if len(key) != _KEY_CHARS:
        return False
    try:
        zmq.curve_public(key)
    except zmq.ZMQError:
        return False
    return True


# Sockets


def _set_common_options(socket: zmq.Socket[bytes], endpoint: str) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, 0)
    if endpoint.startswith("tcp://"):  # a local peer's death is seen at once, a remote one's only by asking
        socket.setsockopt(zmq.HEARTBEAT_IVL, _TCP_PROBE_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _TCP_PROBE_TIMEOUT_MS)


class EngineSocket:
    """The engine's end: a bound ROUTER, and a way to wake its owner. All but `wake` belong to one thread."""

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        """Binds. Takes over the socket file of a dead engine.

        Raises ConfigError for an endpoint that is unsafe without keys, in use by a live engine, or cannot be bound.
        """
        check_endpoint(endpoint, has_keys=keys is not None)
        self._lock_fd = _lock_ipc_path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else -1
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake_fd)  # not with the rest: another thread may be inside `wake`
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._is_closed = False
        _set_common_options(self._socket, endpoint)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError("endpoint", f"cannot listen on {endpoint!r}: {error}") from error
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def receive(self) -> tuple[bytes, bytes] | None:
        """(routing id, frame) of one message, or None when none is there. A message of several frames, which no
        gateway sends, comes as an empty frame."""
        try:
            parts = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return parts[0], parts[1] if len(parts) == 2 else b""

    def send(self, routing_id: bytes, frame: bytes) -> bool:
        """Queue a frame. False when that gateway is not connected; the frame is gone then."""
        try:
            self._socket.send_multipart((routing_id, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
                return False
            raise
        return True

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a frame is there, `wake` was called since the last wait, or the time is over. Whether a frame is
        there."""
        has_frame = False
        for ready, _ in self._poller.poll(max(0, int(timeout_s * 1000 + 0.999))):
            if ready == self._wake_fd:
                os.eventfd_read(self._wake_fd)  # nobody else reads it, so it does not block
            else:
                has_frame = True
        return has_frame

    def wake(self) -> None:
        """End the present or the next `wait`. From any thread, and from a signal handler."""
        if not self._is_closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Send what is queued, for at most a second, and free everything. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._socket.close()
        self._context.term()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)


def refuse_taken(endpoint: str) -> None:
    """Raises ConfigError if something lives on an ipc endpoint already."""
    if endpoint.startswith("ipc://"):
        os.close(_lock_ipc_path(endpoint.removeprefix("ipc://")))


def _lock_ipc_path(path: str) -> int:
    """Take the lock beside the socket file, which its owner's death gives back. Returns the lock's descriptor.

    ZeroMQ unlinks whatever lies at the path before it binds, a live engine's socket too: hence the lock.
    """
    try:
        lock_fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError("endpoint", f"cannot make {path}.lock beside the socket: {error}") from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock_fd)
        raise ConfigError("endpoint", f"another engine runs on ipc://{path}; stop it, or use another path") from error
    problem = ""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            problem = f"{path} exists and is no socket"
        elif _accepts_connections(path):
            problem = f"another program listens on ipc://{path}"
    if problem:
        os.close(lock_fd)
        raise ConfigError("endpoint", f"{problem}; use another path")
    return lock_fd


def _accepts_connections(path: str) -> bool:
    with posix_socket.socket(posix_socket.AF_UNIX, posix_socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) in (0, errno.EAGAIN)


class GatewaySocket:
    """A gateway's end on an asyncio or uvloop loop: a DEALER that reconnects by itself and calls back per frame.

    Frames count for one connection: those still queued when it breaks are dropped, never given to the next engine,
    and nothing can be sent before `on_connected` (say Hello there). Every frame that came in over a connection is
    handed out before its `on_disconnected`. All callbacks run on the loop; they must not raise.
    """

    def __init__(
        self,
        endpoint: str,
        gateway_id: bytes,
        *,
        on_frame: Callable[[bytes], None],
        on_connected: Callable[[], None],
        on_disconnected: Callable[[], None],
        keys: CurveKeys | None = None,
    ) -> None:
        """Raises ConfigError for an endpoint that is unsafe without keys. `gateway_id`: see new_gateway_id."""
        check_endpoint(endpoint, has_keys=keys is not None)
        if keys is not None and not keys.server_public:
            raise ConfigError("curve_server_key", "is needed beside curve_secret_key_file: the engine's public key")
        self.is_connected = False
        self._on_frame = on_frame
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        self._endpoint = endpoint
        self._gateway_id = gateway_id
        self._keys = keys
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_soon: asyncio.Handle | None = None
        self._is_closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    def connect(self) -> None:
        """Begin to connect, from the running loop, and go on trying until closed. Once only."""
        assert self._loop is None and not self._is_closed
        self._loop = asyncio.get_running_loop()
        self._open()

    def send(self, frame: bytes) -> bool:
        """Queue a frame. False when there is no connection. Raises ValueError for one over MAX_FRAME_BYTES."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame may have {MAX_FRAME_BYTES} bytes, this one has {len(frame)}")
        if not self.is_connected or self._socket is None:
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        # Sending consumes the descriptor's edge: without this look, a frame that came in meanwhile would lie there.
        self._look_for_frames(self._socket)
        return True

    def close(self) -> None:
        """Send what is queued, for at most a second, and free everything. No callback comes after. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._close_socket(_LINGER_MS)
        self._context.term()

    def _open(self) -> None:
        assert self._loop is not None
        self._socket = self._context.socket(zmq.DEALER)
        _set_common_options(self._socket, self._endpoint)
        self._socket.setsockopt(zmq.ROUTING_ID, self._gateway_id)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server_public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._loop.add_reader(_descriptor(self._socket), self._drain)
        self._loop.add_reader(_descriptor(self._monitor), self._drain_monitor)
        self._drain_monitor()  # a ZeroMQ socket signals its descriptor only to a reader that has once found it empty
        self._drain()
        self._socket.connect(self._endpoint)

    def _close_socket(self, linger_ms: int) -> None:
        self.is_connected = False
        if self._drain_soon is not None:
            self._drain_soon.cancel()
            self._drain_soon = None
        if self._socket is None or self._monitor is None or self._loop is None:
            return
        self._loop.remove_reader(_descriptor(self._socket))
        self._loop.remove_reader(_descriptor(self._monitor))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
        self._socket = self._monitor = None

    def _look_for_frames(self, socket: zmq.Socket[bytes]) -> None:
        if int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN and self._drain_soon is None and self._loop is not None:
            self._drain_soon = self._loop.call_soon(self._drain_scheduled)

    def _drain_scheduled(self) -> None:
        self._drain_soon = None
        self._drain()

    def _drain(self, budget_s: float = _DRAIN_BUDGET_S) -> None:
        """Hand out frames until none is left or the time is up; in that case go on after the loop's other work."""
        until_s = time.monotonic() + budget_s
        while (socket := self._socket) is not None:  # a callback may close
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frame(frame)
            if time.monotonic() >= until_s:
                if self._socket is not None:
                    self._look_for_frames(self._socket)
                return

    def _drain_monitor(self) -> None:
        while (monitor := self._monitor) is not None:
            try:
                message = monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle_event(parse_monitor_message(message)["event"])

    def _handle_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._socket is not None:
            self.is_connected = True
            self._look_for_frames(self._socket)
            self._on_connected()
        elif event == zmq.EVENT_DISCONNECTED and self.is_connected:
            self._drain(budget_s=float("inf"))
            if self._is_closed:
                return
            # ZeroMQ would keep this connection's unsent frames for the next one, and send them before Hello.
            self._close_socket(linger_ms=0)
            self._on_disconnected()
            if not self._is_closed:
                self._open()


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))
