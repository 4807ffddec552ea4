"""Tokenizers of each kind, trained in a fraction of a second, and the folders and GGUF files that hold them."""

import json
from pathlib import Path

import gguf
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from streamkv.model_files import ModelFiles

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "def main(argument: str) -> None:\n    print('hello, world')\n    return None\n",
    "Wörter mit Umlauten, naïve café, Ελληνικά, русский язык, 中文字符, 日本語のテキスト, 한국어 😀 👩‍👩‍👧‍👦",
    "one two three four five six seven eight nine ten 1234567890 3.14159",
    "the there then this that these those where when which while with without within",
] * 4
MISSING_BYTES = frozenset({0x04, 0x06, 0xF1, 0xF2})
"""Bytes that the byte-level tokenizer has no token for, as in a model whose training text had none."""


def train_byte_level(pre: str = "smollm", num_tokens: int = 420) -> Tokenizer:
    """Byte-level BPE that splits text as GGUF's tokenizer.ggml.pre of that name says; special tokens at 0, 1, 2."""
    split: list[pre_tokenizers.PreTokenizer]
    if pre == "gpt-2":
        split = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    elif pre == "smollm":
        split = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    else:
        digits = {"llama-bpe": "{1,3}", "qwen2": ""}[pre]
        words = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        split = [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    written = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=num_tokens,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=[character for byte, character in written.items() if byte not in MISSING_BYTES],
            show_progress=False,
        ),
    )
    return tokenizer


def train_byte_fallback() -> Tokenizer:
    """Llama's first kind: ▁ for a space, byte tokens for what has no piece, and a begin token before every prompt."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(
        [text for text in CORPUS if text.isascii()], trainers.BpeTrainer(vocab_size=200, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [tuple(merge) for merge in model["merges"]]
    made = [left + right for left, right in merges]
    letters = sorted(piece for piece in model["vocab"] if piece not in set(made))
    texts = ["<unk>", "<s>", "</s>", *bytes_, *dict.fromkeys(made), *letters]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(texts)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in texts[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def train_metaspace() -> Tokenizer:
    """A kind whose pieces say nothing by themselves of the text that they make; it has an unknown token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(
        [text for text in CORPUS if text.isascii()],
        trainers.UnigramTrainer(
            vocab_size=120, special_tokens=["<unk>", *SPECIAL_TOKENS], unk_token="<unk>", show_progress=False
        ),
    )
    return tokenizer


def write_folder(
    folder: Path, tokenizer: tokenizers.Tokenizer, chat_template: str | None = CHATML, **config: object
) -> ModelFiles:
    """A model's folder without its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return ModelFiles("folder", folder, folder.name, folder, ())


def write_gguf(
    path: Path,
    tokenizer: tokenizers.Tokenizer,
    kind: str,
    pre: str,
    chat_template: str | None = CHATML,
    special_names: dict[str, int] | None = None,
    add_bos: bool | None = None,
) -> ModelFiles:
    """A GGUF file that holds this tokenizer and no tensors. kind: gpt2 or llama. special_names: bos, eos, unk → id."""
    model = json.loads(tokenizer.to_str())["model"]
    added = tokenizer.get_added_tokens_decoder()
    by_id = {token_id: text for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    texts = [by_id[token_id] for token_id in range(len(by_id))]
    types = []
    for token_id, text in enumerate(texts):
        if token_id in added:
            types.append(gguf.TokenType.CONTROL if added[token_id].special else gguf.TokenType.USER_DEFINED)
        elif kind == "llama" and text.startswith("<0x"):
            types.append(gguf.TokenType.BYTE)
        else:
            types.append(gguf.TokenType.NORMAL)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(texts)
    writer.add_token_types(types)
    if kind == "gpt2":
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    else:
        rank = {left + right: index for index, (left, right) in reversed(list(enumerate(model["merges"])))}
        writer.add_token_scores([-float(rank.get(text, len(rank))) for text in texts])
    for name, token_id in (special_names or {}).items():
        {"bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id, "unk": writer.add_unk_token_id}[name](token_id)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ModelFiles("gguf", path, path.stem, path, (path,))
