"""The decoder agrees with transformers, however its tokens are cut and batched."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.models.decoder import Decoder
from engine.models.load import load_model
from streamkv.model_files import resolve
from tests.support.tiny_models import CONFIGS, VOCAB_SIZE, PagedSequences, make_tiny_model

RELATIVE = 1e-4
"""Of the largest logit: float32 with the sums in another order."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only wait for a second thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(resolve(str(folder), lambda stage, percent: None), dtype, lambda stage, percent: None)[0]


def prompts(num: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, VOCAB_SIZE, (num, length), generator=generator).tolist()


def expected_logits(reference: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab] float32."""
    with torch.inference_mode():
        return reference(torch.tensor([ids]), use_cache=False).logits[0].float()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, relative: float = RELATIVE) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    assert (actual - expected).abs().max() <= relative * expected.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_in_one_piece_in_chunks_and_token_by_token(name: str, tmp_path: Path) -> None:
    reference = make_tiny_model(name, tmp_path)
    model = load(tmp_path)
    (ids,) = prompts(1, 40)
    expected = expected_logits(reference, ids)
    for sizes in ([40], [1] * 40, [7, 16, 1, 16], [3, 30, 1, 1, 5]):
        sequence = PagedSequences(model.config, 1)
        start = 0
        for size in sizes:
            logits = model(sequence.batch({0: ids[start : start + size]}), sequence.caches)
            start += size
            assert_close(logits, expected[start - 1 : start])


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "qwen3", "gemma2", "gemma3"])
def test_decodes_and_prompts_of_one_step_do_not_see_each_other(name: str, tmp_path: Path) -> None:
    reference = make_tiny_model(name, tmp_path)
    model = load(tmp_path)
    ids = prompts(4, 30)
    expected = [expected_logits(reference, sequence_ids) for sequence_ids in ids]
    sequences = PagedSequences(model.config, 4)
    model(sequences.batch({0: ids[0][:9], 1: ids[1][:20], 2: ids[2][:1]}), sequences.caches)
    mixed = {3: ids[3][:13], 0: ids[0][9:10], 2: ids[2][1:12], 1: ids[1][20:21]}
    logits = model(sequences.batch(mixed), sequences.caches)
    # Rows come in the order of the step's entries, not in that of the packed tokens.
    for row, (i, position) in zip(logits, [(3, 12), (0, 9), (2, 11), (1, 20)], strict=True):
        assert_close(row, expected[i][position])


def test_only_the_sampled_rows_get_logits_and_the_others_still_leave_their_keys_and_values(tmp_path: Path) -> None:
    reference = make_tiny_model("llama", tmp_path)
    model = load(tmp_path)
    ids = prompts(2, 12)
    sequences = PagedSequences(model.config, 2)
    none = model(sequences.batch({0: ids[0][:6], 1: ids[1][:6]}, sampled=set()), sequences.caches)
    assert none.shape == (0, VOCAB_SIZE)
    logits = model(sequences.batch({0: ids[0][6:], 1: ids[1][6:]}, sampled={1}), sequences.caches)
    assert_close(logits, expected_logits(reference, ids[1])[-1:])


def test_a_config_of_transformers_4_means_the_same(tmp_path: Path) -> None:
    reference = make_tiny_model("llama-llama3-rope", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
    model = load(tmp_path)
    (ids,) = prompts(1, 40)
    sequence = PagedSequences(model.config, 1)
    assert_close(model(sequence.batch({0: ids}), sequence.caches), expected_logits(reference, ids)[-1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_give_logits_as_good_as_those_of_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = make_tiny_model("qwen2", tmp_path, dtype)
    (ids,) = prompts(1, 20)
    narrow = expected_logits(reference, ids)
    exact = expected_logits(reference.float(), ids)
    allowed = 2 * (narrow - exact).abs().max()
    model = load(tmp_path, dtype)
    whole, single = PagedSequences(model.config, 1), PagedSequences(model.config, 1)
    in_one = model(whole.batch({0: ids}), whole.caches)
    one_by_one = torch.cat([model(single.batch({0: [token_id]}), single.caches) for token_id in ids])
    assert (in_one - exact[-1:]).abs().max() <= allowed
    assert (one_by_one - exact).abs().max() <= allowed
    assert allowed < 0.2 * exact.abs().max()
