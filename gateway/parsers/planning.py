"""What a chat request and its model make of an answer's text: how it is parsed, and what it must look like."""

import json
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.parsers import reasoning
from gateway.parsers.answer_parser import Parsing
from gateway.parsers.model_formats import ModelFormats
from gateway.parsers.pieces import SPACE
from gateway.parsers.tool_calls import CallOptions
from gateway.response_format import HERMES_CALL, LLAMA_CALL, CallableFunction, CallForm, grammar_of_calls, literal
from gateway.schema.chat import ChatRequest
from gateway.schema.tools import ToolUse
from gateway.tokenizer import Tokenizer
from streamkv.errors import InvalidField
from streamkv.sampling import Grammar

_END_TOKENS: Final = 16
MAX_FORCED_CALLS: Final = 16
"""Most calls where at least one must be made."""
_MISTRAL_LIST: Final = CallForm(
    begin="[TOOL_CALLS][", before='{"name": "', between='", "arguments": ', after="}", separator=", ", end="]"
)
_MISTRAL_CALL: Final = CallForm(before="[TOOL_CALLS]", between="[ARGS]", after="")
_FORMS: Final[Mapping[str, CallForm]] = {"hermes": HERMES_CALL, "llama3": LLAMA_CALL, "mistral": _MISTRAL_LIST}


def begins_in_reasoning(request: ChatRequest, prompt_token_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the prompt ends inside of thoughts: its template opened them, or they stand in the message that goes
    on."""
    if request.continue_final_message:
        continued = request.messages[-1].content
        return continued.rfind(reasoning.BEGIN_MARK) > continued.rfind(reasoning.END_MARK)
    end = tokenizer.decode(prompt_token_ids[-_END_TOKENS:], skip_special_tokens=False)
    return end.rstrip(SPACE).endswith(reasoning.BEGIN_MARK)


def plan_parsing(
    request: ChatRequest, formats: ModelFormats, prompt_token_ids: Sequence[int], tokenizer: Tokenizer
) -> Parsing | None:
    """None: the text goes out as it is. Raises InvalidField for tools that nobody could tell calls of."""
    tools = request.tool_use
    tool_format = formats.tool_format if tools.may_call else ""
    if tools.may_call and not tool_format and (tools.must_call or not formats.leaves_calls_alone):
        raise InvalidField(
            "tool_choice" if tools.must_call else "tools",
            "are of no use: the server does not know how this model writes a call; --tool-call-parser says it when the "
            "server is started",
        )
    if not tool_format and not formats.splits_reasoning:
        return None
    hidden_marks = formats.special_marks(tool_format) if request.options.skip_special_tokens else ()
    return Parsing(
        tool_format=tool_format,
        calls=CallOptions(tuple(function.name for function in tools.functions), tools.parallel)
        if tool_format
        else CallOptions(),
        splits_reasoning=formats.splits_reasoning,
        begins_in_reasoning=formats.splits_reasoning and begins_in_reasoning(request, prompt_token_ids, tokenizer),
        include_reasoning=request.include_reasoning,
        shown_special_ids=tuple(formats.special_ids[mark] for mark in hidden_marks),
        hidden_marks=hidden_marks,
    )


def plan_grammar(request: ChatRequest, formats: ModelFormats, parsing: Parsing) -> Grammar | None:
    """What the whole text must look like: what the request asks for, with calls and thoughts where they belong.

    Raises InvalidField for a form of the answer beside a call that must be made.
    """
    wanted = request.options.grammar
    tools = request.tool_use
    if tools.may_call and tools.must_call:
        if wanted is not None:
            raise InvalidField(wanted.field, "cannot be used where tool_choice asks for a call; send one of them")
        return _with_thoughts(f"answer: {_nested(_calls(tools, formats))}", formats, parsing, "tools")
    if wanted is None:
        return None
    if parsing.tool_format:
        either = f"answer: {_nested(_calls(tools, formats))} | {_nested(wanted)}"
        return _with_thoughts(either, formats, parsing, wanted.field)
    return _with_thoughts(f"answer: {_nested(wanted)}", formats, parsing, wanted.field)


def _calls(tools: ToolUse, formats: ModelFormats) -> Grammar:
    functions = [
        CallableFunction(function.name, function.parameters)
        for function in tools.functions
        if tools.named in ("", function.name)
    ]
    form = _FORMS[formats.tool_format]
    if formats.tool_format == "mistral" and formats.names_before_arguments:
        form = _MISTRAL_CALL
    max_calls = MAX_FORCED_CALLS if tools.parallel and not tools.named else 1
    return grammar_of_calls(functions, form, "tools", max_calls=max_calls, special_ids=formats.special_ids)


def _nested(grammar: Grammar) -> str:
    """As the right side of a rule."""
    match grammar.kind:
        case "json_object":
            return '%json {"type":"object"}'
        case "json_schema":
            return f"%json {grammar.text}"
        case "regex":
            return f"/{_escape_slashes(grammar.text)}/"
        case "choice":
            return "(" + " | ".join(literal(choice) for choice in json.loads(grammar.text)) + ")"
        case _:
            return f"%lark {{\n{grammar.text}\n}}"


def _escape_slashes(pattern: str) -> str:
    """A slash ends a pattern in Lark, if no backslash stands before it; and \\d is any script's digit there, but one
    from 0 to 9 where a pattern stands alone."""
    written: list[str] = []
    is_escaped = False
    for character in pattern:
        if is_escaped and character in "dD":
            written[-1] = "[0-9]" if character == "d" else "[^0-9]"
        else:
            written.append("\\/" if character == "/" and not is_escaped else character)
        is_escaped = character == "\\" and not is_escaped
    return "".join(written)


def _with_thoughts(answer: str, formats: ModelFormats, parsing: Parsing, field: str) -> Grammar:
    """What the model thinks first is left free, to its end mark."""
    if not parsing.splits_reasoning:
        return Grammar("lark", f"start: answer\n{answer}\n", field)
    ids = formats.special_ids
    begin = "" if parsing.begins_in_reasoning else f"{literal(reasoning.BEGIN_MARK, ids)} "
    optional = "" if parsing.begins_in_reasoning else "?"
    if reasoning.END_MARK in ids:
        thoughts = f"thoughts: /(.|\\n)*/ {literal(reasoning.END_MARK, ids)}"
    else:
        thoughts = "thoughts[lazy]: /(.|\\n)*<\\/think>/"
    rules = [f"start: thinking{optional} answer", f"thinking: {begin}thoughts SPACE", thoughts, "SPACE: /[ \\n]{0,4}/"]
    return Grammar("lark", "\n".join([*rules, answer, ""]), field)
