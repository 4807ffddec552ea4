"""What a model writes calls and thoughts like, found out from its chat template and its tokens, or said by settings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.chat_template import AddedToken
from gateway.parsers import hermes, llama3, mistral, reasoning
from streamkv.config import GatewayConfig

_MARKS: Final[Mapping[str, tuple[str, ...]]] = {
    "hermes": (hermes.HermesParser.mark, hermes.END_MARK),
    "mistral": (mistral.MistralParser.mark, mistral.ARGUMENTS_MARK, mistral.ID_MARK),
    "llama3": (llama3.Llama3Parser.mark,),
}
"""Formats in the order in which they are looked for, with their marks; the first tells them apart."""
_REASONING_MARKS: Final = (reasoning.BEGIN_MARK, reasoning.END_MARK)


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """How one model writes."""

    tool_format: str
    """hermes, llama3 or mistral; empty: its calls are not looked for, or nobody knows."""
    splits_reasoning: bool
    special_ids: Mapping[str, int]
    """Those of the marks that are special tokens."""
    leaves_calls_alone: bool = False
    """Calls are text, by the server's settings."""
    names_before_arguments: bool = False
    """Of Mistral's two forms the newer."""

    def special_marks(self, tool_format: str) -> tuple[str, ...]:
        """The special tokens that a parser must see. tool_format: empty if calls are not looked for."""
        marks = _MARKS.get(tool_format, ()) + (_REASONING_MARKS if self.splits_reasoning else ())
        return tuple(mark for mark in marks if mark in self.special_ids)


def find_formats(chat_template: str, added_tokens: Sequence[AddedToken], config: GatewayConfig) -> ModelFormats:
    """chat_template: its source. What a template names counts before what tokens there are: models that were trained
    further keep the tokens of those that they came from."""
    texts = {token.text for token in added_tokens}
    tool_format: str = config.tool_call_parser
    if tool_format == "auto":
        tool_format = _first_named(chat_template) or _first_named(texts)
    elif tool_format == "none":
        tool_format = ""
    begin_mark = reasoning.BEGIN_MARK
    splits_reasoning = config.reasoning_parser == "think" or (
        config.reasoning_parser == "auto" and (begin_mark in chat_template or begin_mark in texts)
    )
    marks = {mark for marks in _MARKS.values() for mark in marks} | set(_REASONING_MARKS)
    special_ids = {token.text: token.token_id for token in added_tokens if token.is_special and token.text in marks}
    return ModelFormats(
        tool_format,
        splits_reasoning,
        special_ids,
        leaves_calls_alone=config.tool_call_parser == "none",
        names_before_arguments=mistral.ARGUMENTS_MARK in texts,
    )


def _first_named(source: str | Iterable[str]) -> str:
    return next((name for name, marks in _MARKS.items() if marks[0] in source), "")
