"""How a field is described: a JSON schema, and whether the field works here, is refused, or has no effect.

Null is the same as leaving a field out, so every schema of a field allows it.
"""

from collections.abc import Iterable
from typing import Final

Schema = dict[str, object]

SUPPORT: Final = "x-support"
"""Key that says `works`, `refused` (but for values that change nothing) or `ignored`."""


def _field(description: str, default: object = None, **rest: object) -> Schema:
    schema: Schema = {"description": description, **rest, SUPPORT: "works"}
    return schema if default is None else {**schema, "default": default}


def flag(description: str, default: bool) -> Schema:
    return _field(description, default, type=["boolean", "null"])


def whole(description: str, low: int, high: int, default: int | None = None) -> Schema:
    """A whole number in [low, high]."""
    return _field(description, default, type=["integer", "null"], minimum=low, maximum=high)


def number(description: str, low: float, high: float, default: float, *, is_over: bool = False) -> Schema:
    """A number in [low, high]; is_over: low itself is not allowed."""
    bound = "exclusiveMinimum" if is_over else "minimum"
    return _field(description, default, type=["number", "null"], **{bound: low, "maximum": high})


def text(description: str, max_chars: int | None = None, min_chars: int | None = None) -> Schema:
    bounds = {"minLength": min_chars, "maxLength": max_chars}
    return _field(description, type=["string", "null"], **{key: n for key, n in bounds.items() if n is not None})


def one_of(description: str, values: Iterable[str], default: str | None = None) -> Schema:
    return _field(description, default, enum=[*values, None])


def listed(description: str, items: Schema, low: int = 0, high: int | None = None) -> Schema:
    bounds: Schema = {"minItems": low} if low else {}
    bounds |= {"maxItems": high} if high is not None else {}
    return _field(description, type=["array", "null"], items=items, **bounds)


def mapping(description: str, values: Schema | None = None, **rest: object) -> Schema:
    """An object with any keys."""
    return _field(description, type=["object", "null"], **({"additionalProperties": values} if values else {}), **rest)


def nested(description: str, properties: dict[str, Schema], required: Iterable[str] = ()) -> Schema:
    """An object with these keys."""
    return _field(description, **record(properties, required, is_nullable=True))


def either(description: str, *schemas: Schema, default: object = None) -> Schema:
    return _field(description, default, anyOf=[*schemas, {"type": "null"}])


def refused(description: str, *accepted: object) -> Schema:
    """Not supported: only null and what would change nothing are taken."""
    allowed = {"enum": [*accepted, None]} if accepted else {"type": "null"}
    return {"description": f"Not supported. {description}".rstrip(), **allowed, SUPPORT: "refused"}


def ignored(description: str) -> Schema:
    """Taken, whatever it is, and without effect."""
    return {"description": f"Taken without effect. {description}".rstrip(), SUPPORT: "ignored"}


def record(properties: dict[str, Schema], required: Iterable[str] = (), *, is_nullable: bool = False) -> Schema:
    """An object with these keys and no others. Those that are required may not be null."""
    needed = sorted(required)
    shown = {
        name: {**schema, "type": _without_null(schema)} if name in needed and "type" in schema else schema
        for name, schema in properties.items()
    }
    return {
        "type": ["object", "null"] if is_nullable else "object",
        "properties": shown,
        "additionalProperties": False,
        **({"required": needed} if needed else {}),
    }


def _without_null(schema: Schema) -> object:
    types = schema["type"]
    if not isinstance(types, list):
        return types
    rest = [name for name in types if name != "null"]
    return rest[0] if len(rest) == 1 else rest


def answer(properties: dict[str, Schema], optional: Iterable[str] = ()) -> Schema:
    """An object of an answer: all keys but the optional ones are there, and more may come in later versions."""
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(set(properties) - set(optional)),
    }


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
