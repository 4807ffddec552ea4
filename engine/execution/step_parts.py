"""What steps on a GPU are made of: parts of fixed sizes, each a number of launches, or a CUDA graph once captured.

A step has a body, which goes by the number of tokens, a head and sampling, which go by the number of sequences; body
and head are one part where every sequence decodes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch

from engine.execution.cuda_graph import GraphKey, StepGraphs, bucket, sequence_buckets, token_buckets
from engine.execution.device_sampler import DeviceSampler
from engine.execution.gpu_inputs import DeviceBooks, StagedStep
from engine.execution.kv_cache import KvCache
from engine.models.gpu_model import GpuModel

_LOGITS_BYTES: Final = 256 * 1024 * 1024
"""Of a prompt's logits that are there at once."""

Part = tuple[GraphKey, Callable[[], None]]
"""With what launches it."""


class StepParts:
    """Launches the parts of steps on the current stream, which must be the same for all calls.

    They hand over to each other in buffers, at the same addresses in every step. Sizes go up in steps; what is less is
    padded.
    """

    def __init__(
        self,
        model: GpuModel,
        books: DeviceBooks,
        sampler: DeviceSampler,
        graphs: StepGraphs,
        max_num_seqs: int,
        max_num_tokens: int,
        device: torch.device,
    ) -> None:
        config = model.config
        self.model = model
        self.books = books
        self.sampler = sampler
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.device = device
        self.cache: KvCache
        """Set before anything is launched, and changed before anything is captured: by `use`."""
        self.graphs = graphs
        self.sequence_sizes = sequence_buckets(max_num_seqs)
        self.decode_sizes = self.sequence_sizes
        self.token_sizes = token_buckets(max_num_tokens)
        self.logits = torch.zeros(max_num_seqs, config.vocab_size, dtype=torch.float32, device=device)
        """Of the newest step, a row for each of its sequences."""
        self.token_ids = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        """Those sampled."""
        self._scales: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        width = config.num_heads * config.head_dim
        self._attended = torch.zeros(max_num_tokens, width, dtype=model.dtype, device=device)
        self._residual = torch.zeros(max_num_tokens, config.hidden_size, dtype=model.dtype, device=device)

    def use(self, cache: KvCache) -> None:
        """From now on keys and values are there."""
        self.cache = cache
        self._scales = None
        if cache.key_scales is not None and cache.value_scales is not None:
            self._scales = list(zip(cache.key_scales, cache.value_scales, strict=True))

    def drop_cache(self) -> None:
        """Until the next `use` nothing is launched."""
        del self.cache
        self._scales = None

    def all(self) -> Iterator[Part]:
        """Everything that steps are made of, the largest first."""
        for num_tokens in reversed(self.token_sizes):
            yield ("body", num_tokens), partial(self.launch_body, num_tokens)
        for num_seqs in reversed(self.sequence_sizes):
            yield ("head", num_seqs), partial(self.launch_head, num_seqs)
            yield ("sample", num_seqs), partial(self.launch_sampling, num_seqs, has_filters=False)
            yield ("filter and sample", num_seqs), partial(self.launch_sampling, num_seqs, has_filters=True)
            if num_seqs in self.decode_sizes:
                yield ("decode", num_seqs), partial(self.launch_decode, num_seqs)

    # Of a step

    def forward(self, staged: StagedStep, *, is_whole: bool) -> None:
        """Up to the logits. is_whole: rows of prompts are looked at behind it, so the body's must stay as they are."""
        if staged.is_decode and not is_whole:
            size = bucket(self.decode_sizes, staged.num_seqs)
            self.graphs.run(("decode", size), partial(self.launch_decode, size))
            return
        size = bucket(self.token_sizes, staged.num_tokens)
        self.graphs.run(("body", size), partial(self.launch_body, size))
        size = bucket(self.sequence_sizes, staged.num_seqs)
        self.graphs.run(("head", size), partial(self.launch_head, size))

    def sample(self, num_seqs: int) -> None:
        """Plainly, a row for each entry; who does not sample yet has one that is left out on the device."""
        size = bucket(self.sequence_sizes, num_seqs)
        has_filters = self.sampler.has_filters
        key = ("filter and sample" if has_filters else "sample", size)
        self.graphs.run(key, partial(self.launch_sampling, size, has_filters=has_filters))

    def prompt_logits(self, rows: slice) -> torch.Tensor:
        """Of those rows of the last body's, which stay as they are. → [num_rows, vocab_size] float32."""
        # Copies begin where kernels may read wide, which rows in the middle need not.
        attended, residual = self._attended[rows].clone(), self._residual[rows].clone()
        logits = torch.empty(len(residual), self.model.config.vocab_size, device=self.device)
        self.model.head(attended, residual, logits)
        return logits

    @property
    def most_prompt_rows(self) -> int:
        """Whose logits may be there at once."""
        return max(1, min(self.max_num_tokens, _LOGITS_BYTES // (4 * self.model.config.vocab_size)))

    # Launch by launch

    def launch_body(self, num_tokens: int) -> None:
        batch = self.books.batch(self.max_num_seqs, num_tokens, is_decode=False)
        self.books.expand(batch)
        attended, residual = self._attended[:num_tokens], self._residual[:num_tokens]
        self.model.body(batch, self.cache.layers, self._scales, attended, residual)

    def launch_head(self, num_seqs: int) -> None:
        rows = self.books.part("last_rows", num_seqs)
        attended, residual = self._attended.index_select(0, rows), self._residual.index_select(0, rows)
        self.model.head(attended, residual, self.logits[:num_seqs])

    def launch_decode(self, num_seqs: int) -> None:
        attended, residual = self._attended[:num_seqs], self._residual[:num_seqs]
        batch = self.books.batch(num_seqs, num_seqs, is_decode=True)
        self.books.expand(batch)
        self.model.body(batch, self.cache.layers, self._scales, attended, residual)
        self.model.head(attended, residual, self.logits[:num_seqs])

    def launch_sampling(self, num_seqs: int, *, has_filters: bool) -> None:
        self.sampler.sample(
            self.logits[:num_seqs],
            self.books.part("sample_slots", num_seqs),
            self.books.part("seq_lens", num_seqs),
            self.token_ids[:num_seqs],
            self.books.last_tokens,
            filters=has_filters,
        )
