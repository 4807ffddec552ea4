"""The body itself: bytes → one object, whose fields are not looked at here."""

import json
import re
from typing import Final

import msgspec

from gateway.schema.wording import kind, short
from streamkv.errors import InvalidField

MAX_DEPTH: Final = 32
"""Objects and lists inside each other."""
MAX_CONTAINERS: Final = 50_000
"""Objects and lists in one body."""

# A JSON string with all its escapes
_JSON_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SURROGATE_ESCAPE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def decode_object(body: bytes) -> dict[str, object]:
    """A JSON body → its object. Raises InvalidField("body"): no UTF-8 or JSON (NaN, half a surrogate pair), no object,
    a key twice, nested deeper than MAX_DEPTH, more than MAX_CONTAINERS parts. A few ms per megabyte."""
    if not body.strip():
        raise InvalidField("body", "is empty; send a JSON object")
    num_brackets = _check_num_containers(body)
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise InvalidField("body", f"is nested deeper than {MAX_DEPTH} levels") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        hint = "; \\u escapes of surrogates must come in pairs" if _SURROGATE_ESCAPE.search(body) else ""
        raise InvalidField("body", f"is not valid JSON: {error}{hint}") from error
    fields = _check_object(value)
    # Each key has a colon: as many keys as colons means that none came twice. Colons in texts make it worth a look
    if body.count(b":") != _count_keys(fields, num_brackets) and (twice := _find_duplicate(body)) is not None:
        raise InvalidField("body", f"has the key {short(twice)!r} twice in one object")
    return fields


def decode_msgpack_object(frame: bytes) -> dict[str, object]:
    """A msgpack frame → its object, with the rules of decode_object where msgpack has them. Raises InvalidField."""
    try:
        value = msgspec.msgpack.decode(frame)
    except RecursionError as error:
        raise InvalidField("body", f"is nested deeper than {MAX_DEPTH} levels") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise InvalidField("body", f"is not valid msgpack: {error}") from error
    fields = _check_object(value)
    _count_keys(fields, len(frame))
    return fields


def _check_num_containers(body: bytes) -> int:
    """Brackets outside texts, counted before anything is made of them. Returns how many there are at most."""
    num_brackets = body.count(b"{") + body.count(b"[")
    if num_brackets > MAX_CONTAINERS:
        skeleton = _JSON_STRING.sub(b"", body)
        num_brackets = skeleton.count(b"{") + skeleton.count(b"[")
        if num_brackets > MAX_CONTAINERS:
            raise InvalidField("body", f"has {num_brackets} objects and lists; at most {MAX_CONTAINERS} are taken")
    return num_brackets


def _check_object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidField("body", f"must be an object, got {kind(value)}")
    for key in value:
        if not isinstance(key, str):
            raise InvalidField("body", f"must have texts as keys, got {kind(key)}")
    return value


def _count_keys(fields: dict[str, object], max_containers: int) -> int:
    """All keys of an object and of those inside it. Raises InvalidField for the depth, and for keys that are no texts.

    max_containers: there are no more than these, so that the search may end when all have been seen.
    """
    num_keys = len(fields)
    num_seen = 1
    depth = 1
    level: list[object] = list(fields.values())
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidField("body", f"is nested deeper than {MAX_DEPTH} levels")
        num_seen += len(level)
        below: list[object] = []
        for container in level:
            if isinstance(container, dict):
                if set(map(type, container)) - {str}:
                    raise InvalidField("body", "must have texts as keys in every object")
                num_keys += len(container)
                below.extend(container.values())
            elif num_seen < max_containers and isinstance(container, list):
                below.extend(container)
        level = below
    return num_keys


def _find_duplicate(body: bytes) -> str | None:
    def look(pairs: list[tuple[str, object]]) -> dict[str, object]:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                found.append(key)
            seen.add(key)
        return dict(pairs)

    found: list[str] = []
    json.loads(body, object_pairs_hook=look)
    return found[0] if found else None
