"""The decoder made of kernels agrees with transformers, however its tokens are cut, batched and padded."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from engine.batch import DeviceBatch, ForwardBatch
from engine.layers.gpu_linear import choose_gpu_method
from engine.models.gpu_decoder import GpuDecoder
from engine.models.load import load_model
from streamkv.model_files import resolve
from tests.support.tiny_models import CONFIGS, VOCAB_SIZE, PagedSequences, make_tiny_model

RELATIVE = 1e-4
"""Of the largest logit: float32 with the sums in another order."""
IN_SHORT = ("qwen2-sliding", "gemma2")
"""Of the kinds of models, those that `make test` has time for: with biases and windows; with norms behind, and caps."""
MAX_NUM_SEQS = 5
MAX_NUM_TOKENS = 64


class Model:
    """A GpuDecoder and what its steps hand over in."""

    def __init__(self, folder: Path, device: torch.device, *, is_deterministic: bool = False) -> None:
        method = choose_gpu_method(torch.float32, device, "none", is_deterministic)
        files = resolve(str(folder), lambda stage, percent: None)
        model, self.config = load_model(files, torch.float32, lambda stage, percent: None, method, device)
        self.decoder = GpuDecoder(
            model, 64, MAX_NUM_SEQS, MAX_NUM_TOKENS, torch.float32, device, is_deterministic
        )  # fmt: skip
        self.device = device
        self.attended = torch.zeros(MAX_NUM_TOKENS, self.config.num_heads * self.config.head_dim, device=device)
        self.residual = torch.zeros(MAX_NUM_TOKENS, self.config.hidden_size, device=device)

    def logits(self, batch: ForwardBatch, sequences: PagedSequences, num_padding: int = 0) -> torch.Tensor:
        """Of batch.sample_rows, with rows and sequences behind the batch's."""
        num_seqs, num_tokens = len(batch.seq_lens), len(batch.token_ids) + num_padding
        is_decode = num_seqs == len(batch.token_ids)
        rows = torch.tensor([sequences.tables.index(table) for table in batch.block_tables])

        def ints(values: torch.Tensor | list[int], length: int, rest: int = 0) -> torch.Tensor:
            values = torch.as_tensor(values, dtype=torch.int32)
            padding = torch.full((length - len(values),), rest, dtype=torch.int32)
            return torch.cat((values, padding)).to(self.device)

        padded_seqs = num_tokens if is_decode else MAX_NUM_SEQS
        device_batch = DeviceBatch(
            token_ids=ints(batch.token_ids, num_tokens),
            positions=ints(batch.positions, num_tokens),
            slots=ints(batch.slots, num_tokens),
            query_start_loc=ints(batch.query_start_loc, padded_seqs + 1, len(batch.token_ids)),
            seq_lens=ints(batch.seq_lens, padded_seqs),
            seq_slots=ints(rows, padded_seqs, -1),
            block_tables=ints(torch.tensor(sequences.tables).view(-1), len(sequences.tables) * 16).view(-1, 16),
            has_long=not is_decode,
        )
        attended, residual = self.attended[:num_tokens], self.residual[:num_tokens]
        self.decoder.body(device_batch, sequences.caches, None, attended, residual)
        wanted = batch.sample_rows.to(self.device)
        logits = torch.full((len(wanted), self.config.vocab_size), torch.nan, device=self.device)
        self.decoder.head(attended[wanted], residual[wanted], logits)
        return logits.cpu()


def prompts(num: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, VOCAB_SIZE, (num, length), generator=generator).tolist()


def sequences_on(device: torch.device, model: Model, num_sequences: int) -> PagedSequences:
    sequences = PagedSequences(model.config, num_sequences)
    sequences.caches = [(keys.to(device), values.to(device)) for keys, values in sequences.caches]
    return sequences


def expected_logits(reference: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([ids]), use_cache=False).logits[0].float()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= RELATIVE * expected.abs().max()


@pytest.mark.parametrize(
    "name", [name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.long) for name in CONFIGS]
)
def test_logits_equal_transformers_in_chunks_and_token_by_token(
    name: str, tmp_path: Path, device: torch.device
) -> None:
    reference = make_tiny_model(name, tmp_path)
    model = Model(tmp_path, device)
    (ids,) = prompts(1, 40)
    expected = expected_logits(reference, ids)
    sequences = sequences_on(device, model, 1)
    start = 0
    for size, num_padding in ((20, 3), (1, 0), (1, 2), (17, 0), (1, 0)):
        logits = model.logits(sequences.batch({0: ids[start : start + size]}), sequences, num_padding)
        start += size
        assert_close(logits, expected[start - 1 : start])


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen2-sliding", "qwen3", "gemma3"))]
)
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_decodes_and_prompts_of_one_step_do_not_see_each_other(
    name: str, is_deterministic: bool, tmp_path: Path, device: torch.device
) -> None:
    reference = make_tiny_model(name, tmp_path)
    model = Model(tmp_path, device, is_deterministic=is_deterministic)
    ids = prompts(4, 30)
    expected = [expected_logits(reference, sequence_ids) for sequence_ids in ids]
    sequences = sequences_on(device, model, 4)
    model.logits(sequences.batch({0: ids[0][:9], 1: ids[1][:20], 2: ids[2][:1]}), sequences)
    mixed = {3: ids[3][:13], 0: ids[0][9:10], 2: ids[2][1:12], 1: ids[1][20:21]}
    logits = model.logits(sequences.batch(mixed), sequences, 5)
    for row, (i, position) in zip(logits, [(3, 12), (0, 9), (2, 11), (1, 20)], strict=True):
        assert_close(row, expected[i][position])
    alone = {0: ids[0][10:11], 1: ids[1][21:22]}
    logits = model.logits(sequences.batch(alone), sequences, 1)
    for row, (i, position) in zip(logits, [(0, 10), (1, 21)], strict=True):
        assert_close(row, expected[i][position])
