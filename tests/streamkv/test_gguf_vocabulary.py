"""A GGUF file's tokenizer gives the ids of the tokenizer that it was made from."""

import json
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from gateway.chat_template import ChatMessage
from gateway.tokenizer import Tokenizer as OurTokenizer
from streamkv.errors import ModelError
from streamkv.gguf_vocabulary import build_vocabulary, read_gguf_vocabulary, read_metadata, write_tokenizer_folder
from streamkv.model_files import ModelFiles, resolve
from tests.support.small_tokenizers import CHATML, SPECIAL_TOKENS, train_byte_fallback, train_byte_level, write_gguf

NAMES = {"bos": 1, "eos": 2, "unk": 0}

texts = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.text(st.sampled_from("the quick 0123 'll\n\t.é"), max_size=12),
        st.sampled_from([*SPECIAL_TOKENS, "<tool>", "  ", "\r\n", " 2024", "e\u0301"]),
    ),
    max_size=6,
).map("".join)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Tokenizer]]:
    """Per pre-tokenizer: what was saved, and what was read."""
    folder = tmp_path_factory.mktemp("gguf")
    made = {}
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2"):
        saved = train_byte_level(pre)
        saved.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
        files = write_gguf(folder / f"{pre}.gguf", saved, "gpt2", pre, special_names=NAMES, add_bos=False)
        made[pre] = (saved, read_gguf_vocabulary(files.path).tokenizer)
    saved = train_byte_fallback()
    files = write_gguf(folder / "llama.gguf", saved, "llama", "default", special_names=NAMES)
    made["llama"] = (saved, read_gguf_vocabulary(files.path).tokenizer)
    return made


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "llama"])
@given(text=texts)
@settings(max_examples=100)
def test_any_text_gives_the_ids_of_the_tokenizer_that_was_saved(
    pairs: dict[str, tuple[Tokenizer, Tokenizer]], pre: str, text: str
) -> None:
    saved, read = pairs[pre]
    ids = saved.encode(text).ids
    assert read.encode(text).ids == ids
    for skip in (True, False):
        assert read.decode(ids, skip_special_tokens=skip) == saved.decode(ids, skip_special_tokens=skip)


def test_pre_tokenizers_differ_so_that_taking_the_wrong_one_shows(
    pairs: dict[str, tuple[Tokenizer, Tokenizer]],
) -> None:
    text = "    2 12345 e\u0301 DON'T\n\n x"
    assert len({tuple(saved.encode(text).tokens) for saved, _ in pairs.values()}) == len(pairs)


def test_the_tokenizer_of_the_built_in_model_is_what_its_publisher_wrote() -> None:
    found = read_gguf_vocabulary(resolve("default", lambda stage, percent: None).tokenizer_path)
    facts = json.loads(found.tokenizer.to_str())
    assert facts["pre_tokenizer"]["pretokenizers"][0] == {"type": "Digits", "individual_digits": True}
    assert [token["id"] for token in facts["added_tokens"] if token["special"]] == list(range(17))
    assert found.special_names["bos_token"] == "<|im_start|>"
    assert found.eos_token_ids == [2]
    assert "<|im_start|>assistant" in found.chat_template
    # U+0004 and the first byte of U+40000 have no token
    assert found.tokenizer.encode("\x04").ids == []
    assert len(found.tokenizer.encode("\U00040000").ids) == 3


@pytest.mark.parametrize(
    ("add_bos", "pre", "expected"), [(True, "gpt-2", True), (None, "gpt-2", False), (None, "llama-bpe", True)]
)
def test_begin_of_sequence_is_added_where_the_file_or_its_kind_says_so(
    tmp_path: Path, add_bos: bool | None, pre: str, expected: bool
) -> None:
    files = write_gguf(tmp_path / "m.gguf", train_byte_level(pre), "gpt2", pre, special_names=NAMES, add_bos=add_bos)
    read = read_gguf_vocabulary(files.path).tokenizer
    assert (read.encode("the").ids[0] == 1) is expected


def test_a_gguf_loads_as_the_tokenizer_of_a_model(tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "m.gguf", train_byte_level(), "gpt2", "smollm", special_names=NAMES)
    tokenizer = OurTokenizer.load(files)
    assert tokenizer.eos_token_ids == (2,)
    ids = tokenizer.encode_chat([ChatMessage("user", "the <|im_end|>")])
    assert [token_id for token_id in ids if token_id < 3] == [1, 2, 1]


def test_a_written_folder_loads_as_the_same_tokenizer(tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "m.gguf", train_byte_level(), "gpt2", "smollm", special_names=NAMES)
    write_tokenizer_folder(read_gguf_vocabulary(files.path), tmp_path / "folder")
    from_gguf = OurTokenizer.load(files)
    from_folder = OurTokenizer.load(ModelFiles("folder", tmp_path, "m", tmp_path / "folder", ()))
    chat = [ChatMessage("user", "the quick <|im_start|> 123 é")]
    assert from_folder.encode_chat(chat) == from_gguf.encode_chat(chat)
    assert from_folder.eos_token_ids == from_gguf.eos_token_ids
    assert (tmp_path / "folder" / "chat_template.jinja").read_text() == CHATML


def test_metadata_is_what_the_gguf_package_wrote(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a", 200)
    writer.add_int64("b", -(2**40))
    writer.add_float32("c", 0.5)
    writer.add_bool("d", True)
    writer.add_string("e", "é" * 100)
    writer.add_array("f", [1, -2, 3])
    writer.add_array("g", ["x", "", "中"])
    writer.add_array("h", [0.25, 4.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_metadata(path)
    expected = {"a": 200, "b": -(2**40), "c": 0.5, "d": True, "e": "é" * 100}
    expected |= {"f": [1, -2, 3], "g": ["x", "", "中"], "h": [0.25, 4.0], "general.architecture": "llama"}
    assert metadata == expected


@given(st.data())
@settings(max_examples=30)
def test_a_damaged_file_is_a_model_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("e", "text")
    writer.add_array("g", ["x", "y"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 24))
    path.write_bytes(whole[:cut])
    with pytest.raises(ModelError, match=r"m\.gguf"):
        read_gguf_vocabulary(path)
    spoiled = bytearray(whole)
    spoiled[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(spoiled)
    with pytest.raises(ModelError):
        read_gguf_vocabulary(path)


def facts_of(tokenizer: tokenizers.Tokenizer, **changed: object) -> dict[str, object]:
    model = json.loads(tokenizer.to_str())["model"]
    texts = sorted(model["vocab"], key=model["vocab"].__getitem__)
    facts = {"model": "gpt2", "pre": "smollm", "tokens": texts, "merges": [" ".join(pair) for pair in model["merges"]]}
    return {f"tokenizer.ggml.{name}": value for name, value in (facts | changed).items() if value is not None}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pre": "jais-2"}, "'jais-2'.*not supported.*smollm"),
        ({"model": "rwkv"}, "'rwkv'"),
        ({"model": None}, "tokenizer.ggml.model"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokens": ["a", "a"]}, "twice"),
        ({"merges": ["x y"]}, "merges"),
        ({"token_type": [1]}, "token_type"),
        ({"eos_token_id": 10**6}, "eos_token_id"),
        ({"bos_token_id": "1"}, "bos_token_id"),
    ],
)
def test_what_is_not_supported_or_wrong_is_said(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build_vocabulary(facts_of(train_byte_level(), **changed))  # type: ignore[arg-type]
