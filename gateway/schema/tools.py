"""Functions that a model may call, what a request wants of them, and the calls of earlier turns."""

import json
import re
from typing import Final

import msgspec

from gateway.chat_template import ToolCall
from gateway.schema.body import MAX_DEPTH
from gateway.schema.reader import MAX_LABEL_CHARS, FieldReader
from gateway.schema.wording import kind, short
from streamkv.errors import InvalidField

MAX_TOOLS: Final = 128
MAX_TOOL_CHARS: Final = 64 * 1024
"""Of one function's description, and of its parameters as JSON."""
MAX_ALL_TOOLS_CHARS: Final = 1024 * 1024
MAX_TOOL_CALLS: Final = 128
"""Of one message."""
MAX_ARGUMENTS_CHARS: Final = 1024 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NAME_RULE: Final = "must have 1 to 128 letters, digits, dots, dashes or underscores"


class Function(msgspec.Struct, frozen=True):
    """One that may be called."""

    name: str
    parameters: dict[str, object]
    """A JSON schema of an object."""
    description: str = ""

    def as_tool(self) -> dict[str, object]:
        """As chat templates expect it: OpenAI's form."""
        fields: dict[str, object] = {"name": self.name}
        if self.description:
            fields["description"] = self.description
        return {"type": "function", "function": fields | {"parameters": self.parameters}}


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat request says of tools."""

    functions: tuple[Function, ...] = ()
    choice: str = "auto"
    """none, auto, required, or function: the one that is named."""
    named: str = ""
    parallel: bool = True
    """False: at most one call."""

    @property
    def may_call(self) -> bool:
        return bool(self.functions) and self.choice != "none"

    @property
    def must_call(self) -> bool:
        return self.choice in ("required", "function")

    def as_tools(self) -> list[dict[str, object]]:
        """For the chat template, also where none may be called: earlier turns may have."""
        return [function.as_tool() for function in self.functions]


def read_tool_use(reader: FieldReader) -> ToolUse:
    """tools, tool_choice and parallel_tool_calls. Raises InvalidField, also for the older functions and
    function_call."""
    functions = read_tools(reader)
    choice, named = _read_choice(reader, functions)
    parallel = reader.boolean("parallel_tool_calls", default=True)
    reader.neutral("functions", [], instead="send tools")
    reader.neutral("function_call", "none", "auto", instead="send tool_choice")
    return ToolUse(functions=functions, choice=choice, named=named, parallel=parallel)


def read_tools(reader: FieldReader) -> tuple[Function, ...]:
    """tools: up to 128 functions, no name twice, together up to 1,048,576 characters."""
    value = reader.take("tools")
    if value is None:
        return ()
    if not isinstance(value, list):
        reader.refuse("tools", f"must be a list of tools, got {kind(value)}")
    if len(value) > MAX_TOOLS:
        reader.refuse("tools", f"takes at most {MAX_TOOLS} tools, got {len(value)}")
    functions: list[Function] = []
    names: set[str] = set()
    num_chars = 0
    for index, tool in enumerate(value):
        path = reader.path(f"tools[{index}]")
        function, function_chars = _read_tool(tool, path)
        if function.name in names:
            raise InvalidField(f"{path}.function.name", f"{function.name!r} is the name of an earlier tool")
        names.add(function.name)
        num_chars += function_chars
        functions.append(function)
    if num_chars > MAX_ALL_TOOLS_CHARS:
        reader.refuse("tools", f"must have at most {MAX_ALL_TOOLS_CHARS} characters together, got {num_chars}")
    return tuple(functions)


def _read_tool(value: object, path: str) -> tuple[Function, int]:
    """type: function. function: name, description (up to 65,536 characters), parameters (a JSON schema of type object,
    up to 65,536 characters; none: no parameters), strict (without effect: a call that must be made always follows its
    schema, others are the model's own)."""
    if not isinstance(value, dict):
        raise InvalidField(path, f"must be an object with type and function, got {kind(value)}")
    reader = FieldReader(value, path + ".")
    tool_type = reader.take("type")
    if tool_type not in (None, "function"):
        reader.refuse("type", f"must be 'function', got {short(repr(tool_type))}")
    if "function" not in reader:
        reader.refuse("function", "is missing; send an object with a name")
    inner = FieldReader(reader.mapping("function"), reader.path("function."))
    reader.finish()
    name = _read_name(inner)
    description = inner.text("description", MAX_TOOL_CHARS)
    parameters = inner.mapping("parameters") or {"type": "object", "properties": {}}
    inner.boolean("strict", default=False)
    inner.finish()
    if parameters.get("type", "object") != "object":
        inner.refuse("parameters.type", f"must be 'object', got {short(repr(parameters['type']))}")
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict):
        inner.refuse("parameters.properties", f"must be an object, got {kind(properties)}")
    num_chars = len(_to_json(parameters, inner.path("parameters")))
    if num_chars > MAX_TOOL_CHARS:
        inner.refuse("parameters", f"must have at most {MAX_TOOL_CHARS} characters as JSON, got {num_chars}")
    return Function(name, parameters, description), num_chars + len(description)


def _read_name(reader: FieldReader) -> str:
    if "name" not in reader:
        reader.refuse("name", "is missing; send the function's name")
    name = reader.text("name")
    if not _NAME.fullmatch(name):
        reader.refuse("name", f"{_NAME_RULE}, got {short(repr(name))}")
    return name


def _read_choice(reader: FieldReader, functions: tuple[Function, ...]) -> tuple[str, str]:
    """tool_choice: none, auto, required or {"type": "function", "function": {"name": …}}. Returns the choice and, for
    the last, the name."""
    value = reader.take("tool_choice")
    if value is None:
        return "auto", ""
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            reader.refuse("tool_choice", f"must be none, auto, required or a function, got {short(repr(value))}")
        if value == "required" and not functions:
            reader.refuse("tool_choice", "is required, but there are no tools; send some")
        return value, ""
    if not isinstance(value, dict):
        reader.refuse("tool_choice", f"must be none, auto, required or a function, got {kind(value)}")
    inner = FieldReader(value, reader.path("tool_choice."))
    choice_type = inner.take("type")
    if choice_type != "function":
        inner.refuse("type", f"must be 'function', got {short(repr(choice_type))}")
    if "function" not in inner:
        inner.refuse("function", "is missing; send an object with the name of one of the tools")
    named = FieldReader(inner.mapping("function"), inner.path("function."))
    inner.finish()
    name = _read_name(named)
    named.finish()
    if name not in {function.name for function in functions}:
        named.refuse("name", f"{short(repr(name))} is not the name of one of the tools")
    return "function", name


def read_tool_calls(reader: FieldReader) -> tuple[ToolCall, ...]:
    """tool_calls of an assistant's message: up to 128 of {"id", "type": "function", "function": {"name",
    "arguments"}}, where arguments is a JSON object as text."""
    value = reader.take("tool_calls")
    if value is None:
        return ()
    if not isinstance(value, list):
        reader.refuse("tool_calls", f"must be a list of calls, got {kind(value)}")
    if len(value) > MAX_TOOL_CALLS:
        reader.refuse("tool_calls", f"takes at most {MAX_TOOL_CALLS} calls, got {len(value)}")
    return tuple(_read_tool_call(call, reader.path(f"tool_calls[{index}]")) for index, call in enumerate(value))


def _read_tool_call(value: object, path: str) -> ToolCall:
    if not isinstance(value, dict):
        raise InvalidField(path, f"must be an object with id, type and function, got {kind(value)}")
    reader = FieldReader(value, path + ".")
    call_id = reader.text("id", MAX_LABEL_CHARS)
    call_type = reader.take("type")
    if call_type not in (None, "function"):
        reader.refuse("type", f"must be 'function', got {short(repr(call_type))}")
    reader.integer("index", 0, MAX_TOOL_CALLS)  # clients send back what a stream's deltas had
    if "function" not in reader:
        reader.refuse("function", "is missing; send an object with name and arguments")
    inner = FieldReader(reader.mapping("function"), reader.path("function."))
    reader.finish()
    name = _read_name(inner)
    arguments = _read_arguments(inner)
    inner.finish()
    return ToolCall(call_id, name, arguments)


def _read_arguments(reader: FieldReader) -> dict[str, object]:
    value = reader.take("arguments")
    if isinstance(value, str):
        if len(value) > MAX_ARGUMENTS_CHARS:
            reader.refuse("arguments", f"must have at most {MAX_ARGUMENTS_CHARS} characters, got {len(value)}")
        if not value.strip():
            return {}
        try:
            value = msgspec.json.decode(value)
        except RecursionError:
            reader.refuse("arguments", "is nested too deeply")
        except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
            reader.refuse("arguments", f"must be a JSON object as text: {error}")
    if value is None:
        return {}
    if not isinstance(value, dict):
        reader.refuse("arguments", f"must be a JSON object as text, got {kind(value)}")
    if _is_deep(value):
        reader.refuse("arguments", f"is nested deeper than {MAX_DEPTH} levels")
    return value


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = [item for inner in containers for item in (inner.values() if isinstance(inner, dict) else inner)]
    return any(isinstance(item, dict | list) for item in level)


def _to_json(value: object, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # msgpack has bytes, NaN and the like
        raise InvalidField(field, f"cannot be written as JSON: {error}") from error
