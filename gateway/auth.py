"""Who asks: API keys from a file or the environment, compared in one place; and which web pages may open a WebSocket.

A key is known here by its SHA-256 alone: the text is not kept, and no log line or error has it.
"""

import hashlib
import hmac
import logging
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import urlsplit

import msgspec

from streamkv.errors import ConfigError, StreamKVError
from streamkv.log import fields

logger = logging.getLogger(__name__)

SINGLE_KEY_VARIABLE: Final = "STREAMKV_API_KEY"
SINGLE_KEY_NAME: Final = "default"
"""Of the key from the environment."""
KEY_PROTOCOL_PREFIX: Final = "streamkv.key."
"""Begins the WebSocket subprotocol by which a browser, which can set no header there, brings its key."""
ANY_ORIGIN: Final = "*"
_MAX_FILE_BYTES: Final = 4 * 1024 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY: Final = re.compile(r"[!-~]{16,256}")
_KEY_RULE: Final = "must have 16 to 256 visible ASCII characters; `openssl rand -hex 32` makes a good one"
_DEFAULT_PORTS: Final = re.compile(r":(?:80|443)\Z")


class Unauthorized(StreamKVError):
    """A request without an API key, or with one that is not known here."""

    def __init__(self, is_missing: bool) -> None:
        super().__init__(
            "an API key is needed: send the header `Authorization: Bearer KEY`"
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


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key's table in the file."""

    key: str
    shares_prefix: bool | None = None
    """None: as the server's setting says."""


class ApiKeys:
    """The keys that are accepted. Without any, everybody is let in as the anonymous caller."""

    def __init__(self, callers: Mapping[bytes, Caller] | None = None) -> None:
        """callers: by the SHA-256 of their key."""
        self._callers = list((callers or {}).items())

    def __len__(self) -> int:
        return len(self._callers)

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Who sent a request with these headers. Raises Unauthorized."""
        if not self._callers:
            return Caller()
        secret = _bearer(headers) or _subprotocol_key(headers)
        if not secret:
            raise Unauthorized(is_missing=True)
        caller = self._find(secret)
        if caller is None:
            raise Unauthorized(is_missing=False)
        return caller

    def _find(self, secret: str) -> Caller | None:
        """Compares with every key, also behind the one that fits, and each time in full."""
        digest = _digest(secret)
        found: Caller | None = None
        for known, caller in self._callers:
            if hmac.compare_digest(digest, known):
                found = caller
        return found


def load_api_keys(path: str, environ: Mapping[str, str], shares_prefix: bool = False) -> ApiKeys:
    """The keys of the file at `path` (empty: none) and that of STREAMKV_API_KEY, whose name is `default`.

    The file is TOML: `name = "key"`, or a table [name] with `key` and `shares_prefix` (default: the parameter). A name
    has 1 to 64 letters, digits, dots, dashes and underscores; a key 16 to 256 visible ASCII characters. Raises
    ConfigError, which names an entry but never shows a key; logs a warning for a file that others can read.
    """
    entries = _read_file(path) if path else {}
    single = environ.get(SINGLE_KEY_VARIABLE, "")
    if single:
        if not _KEY.fullmatch(single):
            raise ConfigError(SINGLE_KEY_VARIABLE, _KEY_RULE)
        if SINGLE_KEY_NAME in entries:
            raise ConfigError(
                SINGLE_KEY_VARIABLE, f"is the key named {SINGLE_KEY_NAME}, which api_keys_file has as well; rename one"
            )
        entries[SINGLE_KEY_NAME] = _Entry(single)
    callers: dict[bytes, Caller] = {}
    for name, entry in entries.items():
        digest = _digest(entry.key)
        if digest in callers:
            raise ConfigError("api_keys_file", f"{callers[digest].name} and {name} have the same key")
        shares = shares_prefix if entry.shares_prefix is None else entry.shares_prefix
        callers[digest] = Caller(name, shares)
    return ApiKeys(callers)


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
    if not table:
        raise ConfigError("api_keys_file", f'{path} has no key; a line of it is: name = "key"')
    return {name: _checked(name, value) for name, value in table.items()}


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
