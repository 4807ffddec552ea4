"""Text → token ids: plain prompts and chats, off the event loop where they are long; and what each id stands for.

Loading and encoding use `tokenizers` and Jinja directly: importing transformers costs seconds and is not needed.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, Literal, NoReturn

import msgspec
import tokenizers

from gateway.chat_template import AddedToken, ChatMessage, ChatTemplate
from gateway.prompt_ids import INLINE_IDS, compact
from streamkv.errors import ConfigError, InvalidField, ModelError
from streamkv.gguf_vocabulary import read_gguf_vocabulary
from streamkv.model_files import ModelFiles

INLINE_CHARS: Final = 2048
"""Texts up to this long are encoded on the event loop (under a millisecond); a thread's round trip costs more."""
NUM_THREADS: Final = 2
GIANT_CHARS: Final = 64 * 1024
"""Texts over this are encoded one after the other, on a thread of their own: the others wait for none of them, and they
leave the event loop a core and the interpreter."""
_GIL_CHARS: Final = 512
_CHARS_PER_TOKEN: Final = 8
_CUT_SLACK_TOKENS: Final = 64

PieceStyle = Literal["bytes", "byte_fallback", "window"]


class Vocabulary:
    """What each token id stands for. Immutable; indexed by any id that the model can sample, padding rows included.

    style says how pieces make a text:
    `bytes`: their bytes joined, decoded as UTF-8, each invalid part as U+FFFD (byte-level BPE);
    `byte_fallback`: whole texts, but a run of byte tokens is decoded together, or is one U+FFFD per token;
    `window`: only the tokenizer's own decoder knows.
    """

    def __init__(
        self,
        style: PieceStyle,
        pieces: list[bytes],
        special_ids: Sequence[int],
        byte_ids: Sequence[int] = (),
        strips_first_space: bool = False,
    ) -> None:
        """pieces: per id; empty where it stands for nothing. byte_ids: the byte tokens of `byte_fallback`.
        strips_first_space: a text's first space is the tokenizer's own and is dropped."""
        self.style = style
        self.pieces = pieces
        self.size = len(pieces)
        self.strips_first_space = strips_first_space
        self.is_special = bytearray(self.size)
        self.is_byte = bytearray(self.size)
        for token_id in special_ids:
            self.is_special[token_id] = 1
        for token_id in byte_ids:
            self.is_byte[token_id] = 1
        self._skipped: dict[tuple[bool, tuple[int, ...]], bytearray] = {(True, ()): self.is_special}
        self.json_pieces: list[bytes | None] = [None] * self.size
        """The piece as the inside of a JSON string, where that is whole characters; None: ask the detokenizer."""
        if style != "window":
            for token_id, piece in enumerate(pieces):
                if not self.is_special[token_id] and not self.is_byte[token_id]:
                    self.json_pieces[token_id] = _to_json_piece(piece)

    def skipped(self, skip_special_tokens: bool, shown_special_ids: tuple[int, ...]) -> bytearray:
        """1 for each id that is no text of an answer. Not to be changed: all streams that ask alike share it."""
        key = (skip_special_tokens, shown_special_ids)
        found = self._skipped.get(key)
        if found is None:
            found = bytearray(self.is_special) if skip_special_tokens else bytearray(self.size)
            for token_id in shown_special_ids:
                found[token_id] = 0
            self._skipped[key] = found
        return found


def json_inside(text: str) -> bytes:
    """Text as the inside of a JSON string."""
    return msgspec.json.encode(text)[1:-1]


def _to_json_piece(piece: bytes) -> bytes | None:
    try:
        return json_inside(piece.decode())
    except UnicodeDecodeError:
        return None


class Tokenizer:
    """A model's tokenizer and chat template. Immutable and safe to use from several threads."""

    def __init__(
        self,
        parsing: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int],
        chat_template: str,
        tool_template: str = "",
        min_vocab_size: int = 0,
    ) -> None:
        """parsing: finds special tokens in text; taken over. named_tokens: bos_token and the like, as texts.
        chat_template: empty for a model without one. tool_template: one of its own for chats with tools; empty: the
        same. min_vocab_size: how many ids the model can sample."""
        parsing.no_truncation()
        parsing.no_padding()
        added = parsing.get_added_tokens_decoder()
        missing = [
            text
            for text in dict.fromkeys(named_tokens.values())
            if (token_id := parsing.token_to_id(text)) is not None and token_id not in added
        ]
        if missing:
            parsing.add_special_tokens(missing)
            added = parsing.get_added_tokens_decoder()
        facts = json.loads(parsing.to_str())
        tokens = [
            AddedToken(token.content, token_id, token.special, token.lstrip, token.rstrip)
            for token_id, token in added.items()
        ]
        self.added_tokens: Sequence[AddedToken] = tokens
        self._template = ChatTemplate(chat_template, tokens, named_tokens) if chat_template else None
        self._tool_template = ChatTemplate(tool_template, tokens, named_tokens) if tool_template else self._template
        special_ids = [token.token_id for token in tokens if token.is_special]
        structural_ids = frozenset(special_ids).union(
            *(template.structural_ids for template in (self._template, self._tool_template) if template is not None)
        )
        self._parsing = parsing
        self._literal = _make_literal(facts, structural_ids)
        later = _without_prefix(facts)
        self._continuing = self._literal if later == facts else _make_literal(later, structural_ids)
        self.eos_token_ids = tuple(eos_token_ids)
        self._missing_bytes = _missing_bytes(facts, parsing)
        self._unknown_id = None if _is_byte_level(facts) else _read_unknown_id(facts, parsing)
        self._unknown_text = None if self._unknown_id is None else parsing.id_to_token(self._unknown_id)
        self.vocabulary = _read_vocabulary(facts, parsing, special_ids, min_vocab_size)
        self.vocab_size = self.vocabulary.size
        self._model_vocab_size = min_vocab_size
        self._num_ids = max(parsing.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self._giants_pool = ThreadPoolExecutor(1, thread_name_prefix="tokenize-giants")

    @classmethod
    def load(cls, files: ModelFiles, chat_template_file: str = "") -> "Tokenizer":
        """From a model's folder or GGUF file; chat_template_file replaces the model's own template.

        Takes 0.5 to 2 s: not for the event loop. Raises ModelError, or ConfigError for a file that cannot be read.
        """
        template = None
        if chat_template_file:
            try:
                template = _read_text(Path(chat_template_file).expanduser())
            except ModelError as error:
                raise ConfigError("chat_template", str(error)) from error
        if files.kind == "gguf":
            found = read_gguf_vocabulary(files.tokenizer_path)
            return cls(
                found.tokenizer,
                named_tokens=found.special_names,
                eos_token_ids=found.eos_token_ids,
                chat_template=found.chat_template if template is None else template,
            )
        folder = files.tokenizer_path
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there")
        try:
            parsing = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} is no tokenizer that `tokenizers` can read: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        named_tokens = _read_named_tokens(_read_json(folder / "special_tokens_map.json") | config)
        model_config = _read_json(folder / "config.json")
        default, for_tools = _read_chat_templates(folder, config) if template is None else (template, "")
        return cls(
            parsing,
            named_tokens=named_tokens,
            eos_token_ids=_read_eos_ids(folder, model_config, named_tokens, parsing),
            chat_template=default,
            tool_template=for_tools,
            min_vocab_size=_read_vocab_size(model_config),
        )

    def fits(self, vocab_size: int) -> bool:
        """Whether a model of so many ids can be this tokenizer's: it takes every id of it. It may have more, as
        padding; and it may have fewer where the tokenizer's own model has just as many, so with a token unused."""
        return self._num_ids <= vocab_size or self._model_vocab_size == vocab_size

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> str:
        """The source of the template for chats with tools; empty for a model without one."""
        return self._tool_template.source if self._tool_template is not None else ""

    def encode(
        self, text: str, field: str = "prompt", *, add_special_tokens: bool = True, max_tokens: int = 0
    ) -> list[int]:
        """A plain prompt's ids. A special token written in it is that token, as in vLLM's completions, and the
        tokenizer's own begin and end tokens are added if it has any (add_special_tokens).

        max_tokens: a text that surely has more is refused without encoding all of it; 0: no limit.
        Raises InvalidField(field): no text, no tokens, too many, or a character that this tokenizer has no token for.
        """
        self._check_text(text, field)
        self._check_length(text, field, max_tokens)
        ids = _encode(self._parsing, text, add_special_tokens)
        if self._unknown_id is not None and self._unknown_id in ids and (self._unknown_text or "") not in text:
            self._refuse_unknown(text, field)
        if not ids:
            raise InvalidField(field, "is empty: it gives no tokens, and this model has no begin token to start from")
        return ids

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
        max_tokens: int = 0,
    ) -> list[int]:
        """A chat's ids: the template's special tokens, and between them its text and the messages' in one piece.

        Text in a message never becomes a special token (`chat_template` says how). max_tokens: as in encode.
        Raises InvalidField for `messages`, `tools`, `chat_template_kwargs` or `continue_final_message`.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise InvalidField("messages", "this model has no chat template; use /v1/completions or --chat-template")
        for index, message in enumerate(messages):
            self._check_text(message.content, f"messages[{index}].content")
            self._check_text(message.name, f"messages[{index}].name")
            self._check_length(message.content, f"messages[{index}].content", max_tokens)
        parts = template.render(messages, add_generation_prompt, continue_final_message, template_kwargs or {}, tools)
        ids: list[int] = []
        for part in parts:
            if isinstance(part, AddedToken):
                ids.append(part.token_id)
            else:
                self._check_text(part, "messages")
                encoder = self._continuing if ids else self._literal
                part_ids = _encode(encoder, part)
                if self._unknown_id is not None and self._unknown_id in part_ids:
                    self._refuse_unknown(part, "messages")
                ids += part_ids
        if not ids:
            raise InvalidField("messages", "give an empty prompt with this model's chat template")
        return ids

    async def encode_off_loop(
        self, text: str, field: str = "prompt", *, add_special_tokens: bool = True, max_tokens: int = 0
    ) -> list[int]:
        """As encode; a long text is encoded on a thread, without the GIL."""
        call = partial(self.encode, text, field, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        return await self._run(call, len(text))

    async def encode_chat_off_loop(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
        max_tokens: int = 0,
    ) -> list[int]:
        """As encode_chat; a long chat is encoded on a thread."""
        call = partial(
            self.encode_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            tools=tools,
            max_tokens=max_tokens,
        )
        num_chars = sum(len(message.content) + len(message.reasoning) + 32 for message in messages)
        has_objects = bool(tools) or any(message.tool_calls for message in messages)
        return await self._run(call, num_chars + has_objects * INLINE_CHARS)

    async def _run(self, call: Callable[[], list[int]], num_chars: int) -> list[int]:
        if num_chars <= INLINE_CHARS:
            return call()
        pool = self._pool if num_chars <= GIANT_CHARS else self._giants_pool
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    async def compact_off_loop(self, ids: list[int]) -> Sequence[int]:
        """The ids in little memory; many as an array, and the list is empty then."""
        if len(ids) <= INLINE_IDS:
            return ids
        return await asyncio.get_running_loop().run_in_executor(self._pool, compact, ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; those that stand for nothing (padding rows of the model) give none."""
        text: str = self._parsing.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it."""
        return [self._parsing.id_to_token(token_id) or "" for token_id in ids]

    def close(self) -> None:
        """End the threads; texts that still wait for one are not encoded."""
        for pool in (self._pool, self._giants_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_text(self, text: str, field: str) -> None:
        """Refuse what encoding would drop without a word."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            found = f"U+{ord(text[error.start]):04X}"
            raise InvalidField(field, f"holds half a surrogate pair ({found}) at character {error.start}") from error
        if self._missing_bytes and len(data.translate(None, self._missing_bytes)) != len(data):
            for index, character in enumerate(text):
                if any(byte in self._missing_bytes for byte in character.encode()):
                    self._refuse_character(character, index, field)

    def _check_length(self, text: str, field: str, max_tokens: int) -> None:
        """Encode only the beginning of a long text when that is already too much."""
        num_chars = max_tokens * _CHARS_PER_TOKEN
        if max_tokens and len(text) > 2 * num_chars:
            beginning = _encode(self._literal, text[:num_chars])
            if len(beginning) - _CUT_SLACK_TOKENS > max_tokens:
                raise InvalidField(
                    field,
                    f"has over {max_tokens} tokens, more than the model takes for prompt and answer; shorten it "
                    f"(its first {num_chars} of {len(text)} characters alone are {len(beginning)} tokens)",
                )

    def _refuse_unknown(self, text: str, field: str) -> NoReturn:
        for character in dict.fromkeys(text):
            if self._unknown_id in _encode(self._literal, character):
                self._refuse_character(character, text.index(character), field)
        raise InvalidField(field, "holds text that this model's tokenizer has no token for")

    @staticmethod
    def _refuse_character(character: str, index: int, field: str) -> NoReturn:
        raise InvalidField(
            field,
            f"holds U+{ord(character):04X} at character {index}, which this model's tokenizer has no token for; "
            "remove it",
        )


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """The library lets go of the GIL in its batch calls only; for a short text they cost more than they spare."""
    if len(text) <= _GIL_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _make_literal(facts: dict[str, object], structural_ids: frozenset[int]) -> tokenizers.Tokenizer:
    """A tokenizer that takes the tokens of structural_ids for text where it finds them in a text."""
    added = facts["added_tokens"]
    assert isinstance(added, list)
    marked = [{**token, "special": token["special"] or token["id"] in structural_ids} for token in added]
    literal = tokenizers.Tokenizer.from_str(json.dumps({**facts, "added_tokens": marked}))
    literal.encode_special_tokens = True
    return literal


def _without_prefix(facts: dict[str, object]) -> dict[str, object]:
    """For text after a special token, where the tokenizer puts a space before the beginning of a prompt only."""
    later: dict[str, object] = json.loads(
        json.dumps(facts["pre_tokenizer"]).replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    )
    return {**facts, "pre_tokenizer": later}


def _types_in(part: object) -> list[str]:
    """The types of a tokenizer.json component and of those inside it, in order."""
    if not isinstance(part, dict):
        return []
    inner = [entry for key in ("normalizers", "pretokenizers", "decoders") for entry in part.get(key) or []]
    return [str(part.get("type"))] + [name for entry in inner for name in _types_in(entry)]


def _is_byte_level(facts: dict[str, object]) -> bool:
    return "ByteLevel" in _types_in(facts.get("pre_tokenizer")) + _types_in(facts.get("normalizer"))


def _read_unknown_id(facts: dict[str, object], tokenizer: tokenizers.Tokenizer) -> int | None:
    """The token that stands for what has no token, where the model has one: BPE and WordPiece name it, Unigram
    numbers it."""
    model = facts["model"]
    assert isinstance(model, dict)
    text, token_id = model.get("unk_token"), model.get("unk_id")
    return tokenizer.token_to_id(text) if isinstance(text, str) else token_id if isinstance(token_id, int) else None


def _byte_characters() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where it is one, else U+0100 upward."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _missing_bytes(facts: dict[str, object], tokenizer: tokenizers.Tokenizer) -> bytes:
    """The bytes of UTF-8 that a byte-level tokenizer has no token for."""
    if not _is_byte_level(facts):
        return b""
    never_in_utf8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
    return bytes(
        byte
        for character, byte in _byte_characters().items()
        if byte not in never_in_utf8 and tokenizer.token_to_id(character) is None
    )


def _read_vocabulary(
    facts: dict[str, object], tokenizer: tokenizers.Tokenizer, special_ids: Sequence[int], min_size: int
) -> Vocabulary:
    by_text: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    texts = [""] * max(min_size, max(by_text.values(), default=-1) + 1)
    for text, token_id in by_text.items():
        texts[token_id] = text
    decoder = facts.get("decoder")
    steps = _types_in(decoder)
    if steps in (["ByteLevel"], ["Sequence", "ByteLevel"]):
        to_byte = _byte_characters()
        return Vocabulary("bytes", [_byte_level_piece(text, to_byte) for text in texts], special_ids)
    if isinstance(decoder, dict) and steps[:4] == ["Sequence", "Replace", "ByteFallback", "Fuse"]:
        replace, *_ = decoder["decoders"]
        strips = decoder["decoders"][3:]
        one_space = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        if replace["pattern"] == {"String": "▁"} and replace["content"] == " " and strips in ([], [one_space]):
            byte_of = {f"<0x{byte:02X}>": byte for byte in range(256)}
            return Vocabulary(
                "byte_fallback",
                [bytes([byte_of[text]]) if text in byte_of else text.replace("▁", " ").encode() for text in texts],
                special_ids,
                byte_ids=[token_id for token_id, text in enumerate(texts) if text in byte_of],
                strips_first_space=bool(strips),
            )
    return Vocabulary("window", [text.encode() for text in texts], special_ids)


def _byte_level_piece(text: str, to_byte: Mapping[str, int]) -> bytes:
    try:
        return bytes([to_byte[character] for character in text])
    except KeyError:  # an added token with other characters stands for its own text
        return text.encode()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, object]:
    """An object from a file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _read_named_tokens(config: Mapping[str, object]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    found: dict[str, str] = {}
    for name in names:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            found[name] = text
    return found


def _read_eos_ids(
    folder: Path, model_config: Mapping[str, object], named_tokens: Mapping[str, str], tokenizer: tokenizers.Tokenizer
) -> list[int]:
    for config in (_read_json(folder / "generation_config.json"), model_config):
        value = config.get("eos_token_id")
        ids = [token_id for token_id in (value if isinstance(value, list) else [value]) if isinstance(token_id, int)]
        if ids:
            return ids
    token_id = tokenizer.token_to_id(named_tokens.get("eos_token", ""))
    return [] if token_id is None else [token_id]


def _read_vocab_size(model_config: Mapping[str, object]) -> int:
    text_config = model_config.get("text_config")
    for config in (model_config, text_config if isinstance(text_config, dict) else {}):
        value = config.get("vocab_size")
        if isinstance(value, int) and value > 0:
            return value
    return 0


def _read_chat_templates(folder: Path, config: Mapping[str, object]) -> tuple[str, str]:
    """From chat_template.jinja, chat_template.json or the tokenizer's configuration: `default`, and `tool_use` where
    there is one of that name."""
    if (folder / "chat_template.jinja").is_file():
        for_tools = folder / "additional_chat_templates" / "tool_use.jinja"
        return _read_text(folder / "chat_template.jinja"), _read_text(for_tools) if for_tools.is_file() else ""
    for source in (_read_json(folder / "chat_template.json"), config):
        value = source.get("chat_template")
        if isinstance(value, str):
            return value, ""
        if isinstance(value, list):
            named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
            default, tool_use = named.get("default"), named.get("tool_use")
            if not isinstance(default, str):
                raise ModelError(f"{folder} has chat templates {sorted(map(str, named))}, but none named 'default'")
            return default, tool_use if isinstance(tool_use, str) else ""
    return "", ""
