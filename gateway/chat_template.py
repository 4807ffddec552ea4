"""Chat messages → the prompt's text, by the model's Jinja template, with a sure line between template and message.

A template writes special tokens (`<|im_end|>`) to structure the prompt. The same characters inside a message are
text. After rendering the two look alike, so before it every special token that starts inside a message has its
first character replaced by a lone surrogate, one per character (`_Protection`). No message can hold a lone
surrogate (they are refused), so none can forge one; the length of the text stays, and so do white space and all
that templates strip, trim, split at or compare. What still reads as a special token in the rendered text was
written by the template. `render` cuts there and puts the characters back.

Some models structure prompts with added tokens that they do not call special (`<think>`, DeepSeek's `<｜User｜>`).
Those that the template's source names are treated alike, except in an assistant's messages: there they are the
model's own, and templates look for them. Other added tokens (runs of spaces, say) match in texts, as everywhere.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.time_limit import TimeIsOver, TimeLimit
from streamkv.errors import InvalidField, ModelError

MAX_RENDERED_CHARS = 64 * 1024 * 1024
"""A rendering longer than this is refused; every body within its limit stays far below with a template that prints
each message a few times."""
MAX_RENDER_S = 20.0
"""A rendering that takes longer is refused."""
MAX_REPEATED = 1_000_000
"""Largest value that `*` may make of a string or list inside a template."""

ROLES = ("system", "user", "assistant", "tool")

TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""What chat_template_kwargs may not set: the names that the request's own fields fill."""

_FIRST_SURROGATE = 0xD800
_CUT_MARK = "\udfff"
_MAX_HIDDEN_CHARS = 0xDFFF - _FIRST_SURROGATE
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACE = re.compile(r"\s+")


class ToolCall(msgspec.Struct, frozen=True):
    """A call that an assistant's message made."""

    call_id: str
    name: str
    arguments: dict[str, object]
    """A JSON object."""


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn: who speaks (one of ROLES), the text, and the speaker's name if the client gave one."""

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    tool_call_id: str = ""
    """Of a tool: the call that it answers."""
    reasoning: str = ""
    """What an assistant thought; templates get it as `reasoning_content`."""


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is found in a text before all others, and whether it swallows the white space beside it."""

    text: str
    token_id: int
    is_special: bool = True
    takes_left_space: bool = False
    takes_right_space: bool = False


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks what a model was trained on. Here it only prints its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox (no attribute with an underscore, no change of what is handed in, ranges up to 100,000), which
    also bounds what `*` and `**` make."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not (isinstance(left, int | float) and isinstance(right, int | float) and abs(right) <= 64):
                raise jinja2.exceptions.SecurityError("a power in a template takes numbers and an exponent up to 64")
        else:
            for sized, count in ((left, right), (right, left)):
                too_long = isinstance(sized, str | list | tuple) and isinstance(count, int)
                if too_long and len(sized) * count > MAX_REPEATED:
                    raise jinja2.exceptions.SecurityError(f"a template may repeat a value up to {MAX_REPEATED} items")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML and non-ASCII, which models were not trained on
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Protection:
    """Replaces the first character of every occurrence of some tokens in a text by a lone surrogate, and back.

    A text that ends with the beginning of such a token, or begins with the end of one, is treated alike there, so
    that it cannot be completed by what the template puts beside it.
    """

    def __init__(self, texts: Iterable[str], whole: "_Protection | None" = None) -> None:
        """whole: one for these tokens and more, whose `show` is to put back what this one hides."""
        self._tokens = frozenset(texts)
        self._max_length = max(map(len, self._tokens), default=0)
        self._beginnings = {token[:length] for token in self._tokens for length in range(1, len(token))}
        self._ends = {token[length:] for token in self._tokens for length in range(1, len(token))}
        firsts = sorted({text[0] for text in (*self._tokens, *self._ends)})
        if len(firsts) > _MAX_HIDDEN_CHARS:
            raise ModelError(f"the tokenizer's special tokens hold {len(firsts)} characters, too many to tell apart")
        own = {first: chr(_FIRST_SURROGATE + index) for index, first in enumerate(firsts)}
        self._hide: dict[str, str] = own if whole is None else whole._hide
        self._show = {ord(hidden): first for first, hidden in self._hide.items()}
        self._token = re.compile(_any_of(self._tokens)) if self._tokens else None

    def hide(self, text: str) -> str:
        if self._token is None or not text:
            return text
        found: set[int] = set()
        match = self._token.search(text)
        while match is not None:
            found.add(match.start())
            match = self._token.search(text, match.start() + 1)  # tokens may overlap
        for length in range(1, min(self._max_length, len(text) + 1)):
            if text[-length:] in self._beginnings:
                found.add(len(text) - length)
            if text[:length] in self._ends:
                found.add(0)
        if not found:
            return text
        characters = list(text)
        for index in found:
            characters[index] = self._hide[characters[index]]
        return "".join(characters)

    def show(self, text: str) -> str:
        """Put back what hide replaced."""
        return text.translate(self._show)


def _write_arguments_as_text(messages: list[dict[str, object]]) -> bool:
    """The arguments of every call as JSON text. Whether there are any."""
    found = False
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            call["function"]["arguments"] = _tojson(call["function"]["arguments"])
            found = True
    return found


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


class ChatTemplate:
    """A compiled template with the special tokens of its model. Immutable; render may run in several threads."""

    def __init__(self, source: str, added_tokens: Sequence[AddedToken], named_tokens: Mapping[str, str]) -> None:
        """added_tokens: all that the tokenizer has. named_tokens: what the template may print by name, such as
        bos_token. Raises ModelError."""
        try:
            source.encode()
        except UnicodeEncodeError as error:
            raise ModelError("the chat template holds a lone surrogate") from error
        try:
            self._template = _make_environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile: {error} (line {error.lineno})") from error
        self.source = source
        self.knows_tools = re.search(r"\btools\b", source) is not None
        self._knows_tool_messages = re.search(r"\btool\b|\bipython\b", source) is not None
        self._named_tokens = dict(named_tokens)
        structural = [token for token in added_tokens if token.text and (token.is_special or token.text in source)]
        self.structural_ids = frozenset(token.token_id for token in structural)
        """The tokens that only the template may write; an assistant's message may write those that are not special."""
        self._by_text = {token.text: token for token in structural}
        self._protection = _Protection(self._by_text)
        self._assistant_protection = _Protection(
            (token.text for token in structural if token.is_special), whole=self._protection
        )
        self._splitter = re.compile(_any_of(self._by_text)) if self._by_text else None

    def render(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, object],
        tools: Sequence[Mapping[str, object]] = (),
    ) -> list[str | AddedToken]:
        """The prompt as the template's own special tokens and the texts between them, each to be encoded in one piece.

        continue_final_message: the prompt ends where the last message's text ends. template_kwargs: JSON values, also
        protected, as are tools: OpenAI's, of type function. Arguments of calls are objects for the template, or JSON
        texts where it fails over objects. Raises InvalidField for `messages` (empty, or refused by the template),
        `chat_template_kwargs`, `tools` and `continue_final_message`. Cost: linear in the text, times what the template
        does with it.
        """
        if not messages:
            raise InvalidField("messages", "must hold at least one message")
        if continue_final_message and add_generation_prompt:
            raise InvalidField(
                "continue_final_message", "cannot be true together with add_generation_prompt; set that to false"
            )
        if tools and not self.knows_tools:
            raise InvalidField("tools", "this model's chat template has no tools; leave them out")
        given: list[dict[str, object]] = []
        for index, message in enumerate(messages):
            if message.role not in ROLES:
                raise InvalidField(f"messages[{index}].role", f"must be one of {', '.join(ROLES)}")
            if message.role == "tool" and not self._knows_tool_messages:
                raise InvalidField(f"messages[{index}].role", "this model's chat template has no tool messages")
            protection = self._assistant_protection if message.role == "assistant" else self._protection
            content = protection.hide(message.content)
            if continue_final_message and index == len(messages) - 1:
                content += _CUT_MARK + " "
            entry: dict[str, object] = {"role": message.role, "content": content}
            for name, text in (
                ("name", message.name),
                ("tool_call_id", message.tool_call_id),
                ("reasoning_content", message.reasoning),
            ):
                if text:
                    entry[name] = self._protection.hide(text)
            if message.tool_calls:
                entry["tool_calls"] = [self._describe_call(call, f"messages[{index}]") for call in message.tool_calls]
            given.append(entry)
        hidden_tools = [self._hide_all(tool, "tools") for tool in tools] or None
        try:
            rendered = self._run(given, add_generation_prompt, template_kwargs, hidden_tools)
        except InvalidField as refused:
            if not _write_arguments_as_text(given):
                raise
            try:
                rendered = self._run(given, add_generation_prompt, template_kwargs, hidden_tools)
            except InvalidField:
                raise refused from None
        if continue_final_message:
            rendered = self._cut(rendered)
        return self._split(rendered)

    def _describe_call(self, call: ToolCall, field: str) -> dict[str, object]:
        function = {"name": self._protection.hide(call.name), "arguments": self._hide_all(call.arguments, field)}
        described: dict[str, object] = {"type": "function", "function": function}
        if call.call_id:
            described["id"] = self._protection.hide(call.call_id)
        return described

    def _run(
        self,
        messages: list[dict[str, object]],
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, object],
        tools: list[object] | None,
    ) -> str:
        taken = sorted(
            TEMPLATE_NAMES.intersection(template_kwargs) | self._named_tokens.keys() & template_kwargs.keys()
        )
        if taken:
            raise InvalidField("chat_template_kwargs", f"may not set {taken[0]!r}, which the server fills")
        names = {
            **self._named_tokens,
            **{
                str(self._hide_all(name, "chat_template_kwargs")): self._hide_all(value, "chat_template_kwargs")
                for name, value in template_kwargs.items()
            },
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        num_chars = 0
        try:
            with TimeLimit(MAX_RENDER_S):
                for piece in self._template.generate(names):
                    pieces.append(piece)
                    num_chars += len(piece)
                    if num_chars > MAX_RENDERED_CHARS:
                        raise InvalidField(
                            "messages", f"the chat template made more than {MAX_RENDERED_CHARS} characters of them"
                        )
        except TimeIsOver as error:
            text = f"the chat template took longer than {MAX_RENDER_S:g} s over them"
            raise InvalidField("messages", text) from error
        except InvalidField:
            raise
        except Exception as error:  # a template is a program; whatever it raises is about what it was given
            raise InvalidField("messages", f"the model's chat template refuses them: {self._explain(error)}") from error
        return "".join(pieces)

    def _explain(self, error: Exception) -> str:
        """The error's text for a client: no surrogate of ours in it, and not endless."""
        said = self._protection.show(str(error)).encode(errors="replace").decode() or type(error).__name__
        return said if len(said) <= 500 else said[:500] + " …"

    def _hide_all(self, value: object, field: str) -> object:
        if isinstance(value, str):
            if _SURROGATE.search(value):
                raise InvalidField(field, "holds half a surrogate pair")
            return self._protection.hide(value)
        if isinstance(value, list | tuple):
            return [self._hide_all(item, field) for item in value]
        if isinstance(value, dict):
            return {str(self._hide_all(key, field)): self._hide_all(item, field) for key, item in value.items()}
        return value

    def _cut(self, rendered: str) -> str:
        """Drop what the template put after the last message; trim its end where the template trims messages."""
        end = rendered.rfind(_CUT_MARK)
        if end < 0:
            raise InvalidField("continue_final_message", "this model's chat template does not print the last message")
        kept = rendered[:end].replace(_CUT_MARK + " ", "").replace(_CUT_MARK, "")
        return kept if rendered.startswith(" ", end + 1) else kept.rstrip()

    def _split(self, rendered: str) -> list[str | AddedToken]:
        """White space beside a special token that takes it disappears, as when the whole text is encoded at once."""
        if self._splitter is None:
            return [self._protection.show(rendered)] if rendered else []
        parts: list[str | AddedToken] = []
        start = 0
        for match in self._splitter.finditer(rendered):
            token = self._by_text[match.group()]
            text = rendered[start : match.start()]
            if token.takes_left_space:
                text = text.rstrip()
            if text:
                parts.append(self._protection.show(text))
            parts.append(token)
            start = match.end()
            if token.takes_right_space and (space := _SPACE.match(rendered, start)):
                start = space.end()
        if start < len(rendered):
            parts.append(self._protection.show(rendered[start:]))
        return parts
