"""Who asks: API keys from a file or the environment, compared in one place; and which web pages may open a WebSocket.

A key is known here by its SHA-256 alone: the text is not kept, and no log line or error has it. The file is looked at
every few seconds and taken in anew when it has changed.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from gateway.limits import NO_LIMITS, Allowance
from gateway.records import Record
from streamkv.errors import ConfigError, StreamKVError
from streamkv.log import fields

logger = logging.getLogger(__name__)

SINGLE_KEY_VARIABLE: Final = "STREAMKV_API_KEY"
SINGLE_KEY_NAME: Final = "default"
"""Of the key from that variable."""
KEYS_VARIABLE: Final = "STREAMKV_API_KEYS"
"""Keys with names: name=key, with white space between."""
RELOAD_S: Final = 2.0
"""How often the file is looked at."""
KEY_PROTOCOL_PREFIX: Final = "streamkv.key."
"""Begins the WebSocket subprotocol by which a browser, which can set no header there, brings its key."""
ANY_ORIGIN: Final = "*"
_MAX_FILE_BYTES: Final = 4 * 1024 * 1024
_GROUP: Final = "keys"
"""A table of tables: [keys.NAME] says the same as [NAME]."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY: Final = re.compile(r"[!-~]{16,256}")
_KEY_RULE: Final = "must have 16 to 256 visible ASCII characters; `openssl rand -hex 32` makes a good one"
_DEFAULT_PORTS: Final = re.compile(r":(?:80|443)\Z")


class Unauthorized(StreamKVError):
    """A request without an API key, or with one that is not known here."""

    def __init__(self, is_missing: bool) -> None:
        super().__init__(
            "an API key is needed: send the header `Authorization: Bearer KEY` or `x-api-key: KEY`"
            if is_missing
            else "this API key is not known here"
        )
        self.is_missing = is_missing


class OriginRefused(StreamKVError):
    """A web page of another site tries to open a WebSocket."""

    def __init__(self) -> None:
        super().__init__("pages of this origin may not open a WebSocket here; the server's allowed_origins can name it")


class Caller(msgspec.Struct, frozen=True):
    """Whoever sent a request, as the rest of the gateway knows it."""

    name: str = ""
    """The key's, which is the engine's tenant; empty without API keys."""
    shares_prefix: bool = False
    """Its prompts share the prefix cache with those of all who share."""
    allowance: Allowance = NO_LIMITS
    record: Record | None = None
    """Of the request that it sent; None outside of one."""

    @property
    def request_id(self) -> str:
        """Empty outside of a request."""
        return self.record.request_id if self.record is not None else ""


T = TypeVar("T")
_Limit = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key's table in the file."""

    key: str
    shares_prefix: bool | None = None
    """None, here and below: as the server's setting says."""
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    max_concurrent: _Limit | None = None

    def caller(self, name: str, defaults: Caller) -> Caller:
        default = defaults.allowance
        return Caller(
            name,
            _or(self.shares_prefix, defaults.shares_prefix),
            Allowance(
                _or(self.requests_per_minute, default.requests_per_minute),
                _or(self.tokens_per_minute, default.tokens_per_minute),
                _or(self.max_concurrent, default.max_concurrent),
            ),
        )


class ApiKeys:
    """The keys that are accepted. Without any, everybody is let in as the anonymous caller."""

    def __init__(
        self,
        callers: Mapping[bytes, Caller] | None = None,
        *,
        anonymous: Caller | None = None,
        path: str = "",
        load: Callable[[], Mapping[bytes, Caller]] | None = None,
    ) -> None:
        """callers: by the SHA-256 of their key. anonymous: who everybody is without keys. path, load: the file that
        they come from, and how to read it again."""
        self._anonymous = anonymous or Caller()
        self._path = path
        self._load = load
        self._stamp = _stamp(path)
        self._callers = list((load() if load is not None else callers or {}).items())

    def __len__(self) -> int:
        return len(self._callers)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(caller.name for _, caller in self._callers)

    async def follow(self, on_change: Callable[[], None], every_s: float = RELOAD_S) -> None:
        """Take the file in whenever it has changed, until cancelled. Returns at once without a file."""
        while self._path:
            await asyncio.sleep(every_s)
            try:
                if await asyncio.to_thread(self.reload_if_changed):
                    on_change()
            except Exception:
                logger.exception("the API keys could not be looked at")

    def reload_if_changed(self) -> bool:
        """Whether there are other keys now. A file that is gone or wrong changes nothing, and is logged once: who was
        let in before still is, and a key that is gone from a good file is not. Slow: for a thread."""
        stamp = _stamp(self._path)
        if self._load is None or stamp == self._stamp:
            return False
        self._stamp = stamp  # taken before the file is read: what changes meanwhile is seen the next time
        try:
            callers = list(self._load().items())
        except ConfigError as error:
            logger.error("the API keys stay as they were", extra=fields(error=str(error)))
            return False
        before, after = dict(self._callers), dict(callers)
        self._callers = callers
        logger.info(
            "read the API keys again",
            extra=fields(
                num_api_keys=len(after), num_new=len(after.keys() - before), num_gone=len(before.keys() - after)
            ),
        )
        return True

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Who sent a request with these headers. Raises Unauthorized."""
        return self.again(key_digest(headers))

    def again(self, digest: bytes) -> Caller:
        """Who brought the key of this `key_digest`, as things are now. Raises Unauthorized."""
        if not self._callers:
            return self._anonymous
        if not digest:
            raise Unauthorized(is_missing=True)
        caller = self._find(digest)
        if caller is None:
            raise Unauthorized(is_missing=False)
        return caller

    def _find(self, digest: bytes) -> Caller | None:
        """Compares with every key, also behind the one that fits, and each time in full."""
        found: Caller | None = None
        for known, caller in self._callers:
            if hmac.compare_digest(digest, known):
                found = caller
        return found


def load_api_keys(
    path: str, environ: Mapping[str, str], shares_prefix: bool = False, allowance: Allowance = NO_LIMITS
) -> ApiKeys:
    """The keys of the file at `path` (empty: none), those of STREAMKV_API_KEYS, and that of STREAMKV_API_KEY, whose
    name is `default`.

    The file is TOML: `name = "key"`, or a table [name] or [keys.name] with `key`, `shares_prefix` and the limits, for
    which the parameters are the defaults. A name has 1 to 64 letters, digits, dots, dashes and underscores; a key 16 to
    256 visible ASCII characters. Raises ConfigError, which names an entry but never shows a key; logs a warning for a
    file that others can read.
    """
    defaults = Caller(shares_prefix=shares_prefix, allowance=allowance)
    given = _from_environ(environ)
    return ApiKeys(anonymous=Caller(allowance=allowance), path=path, load=lambda: _callers(path, given, defaults))


def _callers(path: str, given: Mapping[str, tuple[str, _Entry]], defaults: Caller) -> dict[bytes, Caller]:
    """By the SHA-256 of their key. given: from the environment, by name, with their variable."""
    entries = _read_file(path) if path else {}
    for name, (variable, entry) in given.items():
        if name in entries:
            raise ConfigError(variable, f"has the key named {name}, which api_keys_file has as well; rename one")
        entries[name] = entry
    callers: dict[bytes, Caller] = {}
    for name, entry in entries.items():
        digest = _digest(entry.key)
        if digest in callers:
            raise ConfigError("api_keys_file", f"{callers[digest].name} and {name} have the same key")
        callers[digest] = entry.caller(name, defaults)
    return callers


def _from_environ(environ: Mapping[str, str]) -> dict[str, tuple[str, _Entry]]:
    found: dict[str, tuple[str, _Entry]] = {}
    for number, pair in enumerate(environ.get(KEYS_VARIABLE, "").split(), 1):
        name, equals, key = pair.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise ConfigError(KEYS_VARIABLE, f"must have name=key, with spaces between; entry {number} is none")
        if not _KEY.fullmatch(key):
            raise ConfigError(KEYS_VARIABLE, f"the key of entry {number} {_KEY_RULE}")
        if name in found:
            raise ConfigError(KEYS_VARIABLE, f"has the name {name} twice")
        found[name] = (KEYS_VARIABLE, _Entry(key))
    single = environ.get(SINGLE_KEY_VARIABLE, "")
    if single:
        if not _KEY.fullmatch(single):
            raise ConfigError(SINGLE_KEY_VARIABLE, _KEY_RULE)
        if SINGLE_KEY_NAME in found:
            raise ConfigError(KEYS_VARIABLE, f"has the name {SINGLE_KEY_NAME}, which is that of {SINGLE_KEY_VARIABLE}")
        found[SINGLE_KEY_NAME] = (SINGLE_KEY_VARIABLE, _Entry(single))
    return found


def _stamp(path: str) -> tuple[int, ...]:
    """What changes with the file's content; empty when it cannot be looked at."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _read_file(path: str) -> dict[str, _Entry]:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError("api_keys_file", f"cannot read {path}: {error.strerror}") from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError("api_keys_file", f"{path} has over {_MAX_FILE_BYTES} bytes")
    if mode & 0o022:
        raise ConfigError("api_keys_file", f"{path} can be changed by others; run chmod 600 on it")
    if mode & 0o044:  # no reason to stop: files that are mounted into a container often are
        logger.warning("others can read the API keys", extra=fields(path=path, remedy="chmod 600"))
    try:
        table = tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError("api_keys_file", f"{path} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        # Where it is wrong, but not what stands there
        place = re.search(r"\(at [^()]*\)\Z", str(error))
        raise ConfigError("api_keys_file", f"{path} is not valid TOML {place[0] if place else ''}".rstrip()) from None
    group = table.get(_GROUP)
    if isinstance(group, dict) and not isinstance(group.get("key"), str):
        del table[_GROUP]
        for name, value in group.items():
            if name in table:
                raise ConfigError("api_keys_file", f"{name} stands there twice, once as {_GROUP}.{name}")
            table[name] = value
    if not table:
        raise ConfigError("api_keys_file", f'{path} has no key; a line of it is: name = "key"')
    return {name: _checked(name, value) for name, value in table.items()}


def _or(given: T | None, default: T) -> T:
    return default if given is None else given


def _checked(name: str, value: object) -> _Entry:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "api_keys_file", f"a name must have 1 to 64 letters, digits, dots, dashes or underscores, got {name[:80]!r}"
        )
    if not isinstance(value, str | dict):
        raise ConfigError("api_keys_file", f"{name} must be a key in quotes, or a table")
    try:
        entry = _Entry(value) if isinstance(value, str) else msgspec.convert(value, _Entry)
    except msgspec.ValidationError as error:
        raise ConfigError("api_keys_file", f"{name}: {error}") from None
    if not _KEY.fullmatch(entry.key):
        raise ConfigError("api_keys_file", f"the key of {name} {_KEY_RULE}")
    return entry


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def key_digest(headers: Mapping[str, str]) -> bytes:
    """SHA-256 of the key that a request brings; empty without one."""
    secret = _bearer(headers) or headers.get("x-api-key", "").strip() or _subprotocol_key(headers)
    return _digest(secret) if secret else b""


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, secret = headers.get("Authorization", "").strip().partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""


def _subprotocol_key(headers: Mapping[str, str]) -> str:
    for name in offered_protocols(headers):
        if name.startswith(KEY_PROTOCOL_PREFIX):
            return name.removeprefix(KEY_PROTOCOL_PREFIX)
    return ""


def offered_protocols(headers: Mapping[str, str]) -> list[str]:
    """The subprotocols that a WebSocket handshake offers, one with a key among them perhaps."""
    return [name for part in headers.get("Sec-WebSocket-Protocol", "").split(",") if (name := part.strip())]


def check_origin(headers: Mapping[str, str], allowed: Collection[str]) -> None:
    """Raises OriginRefused for a page of another site than this server's own, unless `allowed` has its origin or `*`.

    A browser sends the page's origin with every handshake and lets pages of any site make one; other clients send
    none. `allowed`: in lower case.
    """
    origin = headers.get("Origin")
    if origin is None or ANY_ORIGIN in allowed or origin.lower() in allowed:
        return
    if not _is_same_host(origin, headers.get("Host", "")):
        raise OriginRefused()


def _is_same_host(origin: str, host: str) -> bool:
    """Whether a page comes from where its request goes. The scheme is not compared: it may change at a proxy."""
    try:
        netloc = urlsplit(origin).netloc
    except ValueError:
        return False
    return bool(netloc) and _DEFAULT_PORTS.sub("", netloc.lower()) == _DEFAULT_PORTS.sub("", host.lower())
