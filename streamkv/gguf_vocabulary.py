"""The tokenizer inside a GGUF file → a `tokenizers.Tokenizer` that gives the same ids as the model's own.

Only the head of the file is read, once, front to back.
"""

import json
import mmap
from collections.abc import Mapping
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from streamkv.errors import ModelError
from streamkv.gguf_header import GgufHeader, MetadataValue

_MERGES = "tokenizer.ggml.merges"
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""tokenizer.ggml.token_type: what is no ordinary piece."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2_NAMES = frozenset({"gpt-2", "default"})
_DIGIT_NAMES = frozenset({"smollm", "starcoder", "refact", "command-r"})
_LLAMA3_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3"})
_QWEN2_NAMES = frozenset({"qwen2"})


class GgufVocabulary(msgspec.Struct, frozen=True):
    """What a GGUF says of text: the tokenizer and the facts that stand beside tokenizer.json in a model's folder."""

    tokenizer: Tokenizer
    special_names: dict[str, str]
    """bos_token, eos_token, unk_token, pad_token: the token's text, where the file names one."""
    eos_token_ids: list[int]
    chat_template: str
    """Empty: the file has none."""


def read_metadata(path: Path) -> dict[str, MetadataValue]:
    """The key-value pairs at the head of a GGUF file (versions 2 and 3, little-endian). Raises ModelError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return GgufHeader(data, str(path)).metadata()
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


class _Facts:
    """Typed access to the `tokenizer.` keys of the metadata; a missing or wrong one is a ModelError."""

    def __init__(self, metadata: Mapping[str, MetadataValue]) -> None:
        self._metadata = metadata

    def text(self, key: str, default: str = "") -> str:
        value = self._metadata.get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{key} must be text, got {type(value).__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._metadata.get(key, default))

    def token_id(self, key: str, vocab_size: int) -> int | None:
        value = self._metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < vocab_size:
            raise ModelError(f"{key} must be an id below {vocab_size}, got {value!r}")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"{key} is missing or no list of texts")
        return [str(item) for item in value]

    def numbers(self, key: str, length: int, default: float) -> list[float]:
        value = self._metadata.get(key)
        if value is None:
            return [default] * length
        if not isinstance(value, list) or len(value) != length:
            raise ModelError(f"{key} must be a list of {length} numbers")
        return [float(item) for item in value]


def read_gguf_vocabulary(path: Path) -> GgufVocabulary:
    """The tokenizer of a GGUF file. Raises ModelError, also for a kind of tokenizer that is not supported."""
    metadata = read_metadata(path)
    try:
        return build_vocabulary(metadata)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def build_vocabulary(metadata: Mapping[str, MetadataValue]) -> GgufVocabulary:
    """GGUF metadata → tokenizer. Raises ModelError."""
    facts = _Facts(metadata)
    family = facts.text("tokenizer.ggml.model")
    if family not in ("gpt2", "llama"):
        raise ModelError(
            f"tokenizer.ggml.model is {family!r}; supported are 'gpt2' and 'llama'. Use the model's safetensors folder"
        )
    tokens = facts.texts("tokenizer.ggml.tokens")
    types = facts.numbers("tokenizer.ggml.token_type", len(tokens), 1)
    special_ids = {
        name: facts.token_id(f"tokenizer.ggml.{key}_token_id", len(tokens))
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
    }
    tokenizer = _byte_level(facts, tokens) if family == "gpt2" else _sentence_piece(facts, tokens, types)
    typed = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in typed if kind in (_CONTROL, _UNKNOWN)]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token, kind in typed if kind == _USER_DEFINED]
    )
    _add_template(tokenizer, facts, family, tokens, special_ids)
    eos_ids = [special_ids["eos_token"], facts.token_id("tokenizer.ggml.eot_token_id", len(tokens))]
    return GgufVocabulary(
        tokenizer=tokenizer,
        special_names={name: tokens[token_id] for name, token_id in special_ids.items() if token_id is not None},
        eos_token_ids=list(dict.fromkeys(token_id for token_id in eos_ids if token_id is not None)),
        chat_template=facts.text("tokenizer.chat_template"),
    )


def _add_template(
    tokenizer: Tokenizer, facts: _Facts, family: str, tokens: list[str], special_ids: Mapping[str, int | None]
) -> None:
    """Begin and end of sequence around a plain prompt, where the file asks for them."""
    takes_bos = family == "llama" or facts.text("tokenizer.ggml.pre", "default") in _LLAMA3_NAMES
    around: list[str] = ["$A"]
    used: list[tuple[str, int]] = []
    bos, eos = special_ids["bos_token"], special_ids["eos_token"]
    if bos is not None and facts.flag("tokenizer.ggml.add_bos_token", takes_bos):
        around.insert(0, tokens[bos])
        used.append((tokens[bos], bos))
    if eos is not None and facts.flag("tokenizer.ggml.add_eos_token", False):
        around.append(tokens[eos])
        used.append((tokens[eos], eos))
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=around, pair=[*around, "$B"], special_tokens=list(dict(used).items())
        )


def _byte_level(facts: _Facts, tokens: list[str]) -> Tokenizer:
    """BPE over bytes, as GPT-2's; `tokenizer.ggml.pre` names how text is split into words before."""
    pre = facts.text("tokenizer.ggml.pre", "default")
    split: pre_tokenizers.PreTokenizer
    if pre in _GPT2_NAMES:
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif pre in _DIGIT_NAMES:
        split = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif pre in _LLAMA3_NAMES | _QWEN2_NAMES:
        pattern = _LLAMA3_SPLIT if pre in _LLAMA3_NAMES else _QWEN2_SPLIT
        split = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        known = ", ".join(sorted(_GPT2_NAMES | _DIGIT_NAMES | _LLAMA3_NAMES | _QWEN2_NAMES))
        raise ModelError(
            f"tokenizer.ggml.pre is {pre!r}, a way to split text that is not supported (supported: {known}). "
            "Use the model's safetensors folder instead"
        )
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in facts.texts(_MERGES))]
    tokenizer = Tokenizer(_make_bpe(tokens, merges, byte_fallback=False, ignore_merges=pre in _LLAMA3_NAMES))
    if pre in _QWEN2_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(facts: _Facts, tokens: list[str], types: list[float]) -> Tokenizer:
    """Llama's first tokenizer: pieces joined by their scores, a space is ▁, what has no piece falls back to bytes."""
    scores = facts.numbers("tokenizer.ggml.scores", len(tokens), 0.0)
    rank = {token: index for index, token in enumerate(tokens)}
    pairs: list[tuple[float, int, int, str, str]] = []
    for token, score, token_type in zip(tokens, scores, types, strict=True):
        if token_type in (_CONTROL, _UNKNOWN, _USER_DEFINED, _BYTE):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in rank and right in rank:
                pairs.append((-score, rank[left], rank[right], left, right))
    pairs.sort()
    unknown = next((token for token, token_type in zip(tokens, types, strict=True) if token_type == _UNKNOWN), None)
    has_bytes = _BYTE in types
    merges = [(left, right) for *_, left, right in pairs]
    tokenizer = Tokenizer(_make_bpe(tokens, merges, byte_fallback=has_bytes, unknown=unknown))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    ends: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if facts.flag("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(ends)
    return tokenizer


def _make_bpe(
    tokens: list[str],
    merges: list[tuple[str, str]],
    byte_fallback: bool,
    unknown: str | None = None,
    ignore_merges: bool = False,
) -> models.BPE:
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if vocabulary.setdefault(token, token_id) != token_id:
            raise ModelError(f"token {token!r} stands in the vocabulary twice, as {vocabulary[token]} and {token_id}")
    try:
        return models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=unknown,
            fuse_unk=unknown is not None,
            byte_fallback=byte_fallback,
            ignore_merges=ignore_merges,
        )
    except Exception as error:  # the library raises bare Exception for a merge whose parts or result are no tokens
        raise ModelError(f"tokenizer.ggml.merges does not fit the vocabulary: {error}") from error


def write_tokenizer_folder(vocabulary: GgufVocabulary, folder: Path) -> None:
    """Save tokenizer.json, tokenizer_config.json and chat_template.jinja as a model's folder has them."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary.tokenizer.save(str(folder / "tokenizer.json"))
    config = {**vocabulary.special_names, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if vocabulary.chat_template:
        (folder / "chat_template.jinja").write_text(vocabulary.chat_template, encoding="utf-8")
