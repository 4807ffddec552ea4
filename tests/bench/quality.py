"""What 8-bit keys, values and weights cost in quality: python tests/bench/quality.py [--device cuda] [--tokens 24576]

Reads a real text (this repository's pages and the docstrings of Python's own library) in windows, each in chunks, so
that a later chunk reads from the cache what earlier ones have written. For every token: how likely the model finds the
one that comes (perplexity), and how far its distribution is from that of the reference (Kullback-Leibler divergence in
nats). The reference is bfloat16 on a GPU, against which 8-bit variants stand, and float32 on a CPU, against which
bfloat16 stands. On a GPU the first tokens are checked first, against float32 on the CPU.
"""

import argparse
import importlib
import inspect
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.batch import DeviceBatch, ForwardBatch
from engine.models.decoder import Decoder
from engine.models.load import load_model
from gateway.tokenizer import Tokenizer
from streamkv.config import Quantization
from streamkv.model_files import ModelFiles, resolve

ROOT = Path(__file__).parents[2]
BLOCK_SIZE = 16
_MODULES = (
    "argparse asyncio collections concurrent.futures contextlib dataclasses datetime decimal difflib "
    "doctest email enum fractions functools heapq http.client inspect ipaddress itertools json logging "
    "multiprocessing pathlib pickle queue random re sched selectors shutil smtplib socket sqlite3 "
    "statistics string subprocess tarfile tempfile textwrap threading typing unittest urllib.request uuid "
    "weakref xml.etree.ElementTree zipfile"
)
_CHECKED_TOKENS = 128
_LARGEST_CHECKED_KL = 0.02

Forward = Callable[[list[int], int], torch.Tensor]
"""(ids of the next chunk, position of the first) → logits of each [len(ids), vocab_size] float32, on the model's
device. Position 0 begins a new window in the same blocks."""


def text() -> str:
    """Pages of this repository, then docstrings of Python's library, in a fixed order."""
    parts = [(ROOT / "README.md").read_text()]
    parts += [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    for name in _MODULES.split():
        module = importlib.import_module(name)
        parts.append(inspect.getdoc(module) or "")
        for member_name, member in sorted(vars(module).items()):
            if (inspect.isclass(member) or inspect.isfunction(member)) and member.__module__ == name:
                parts.append(f"{name}.{member_name}\n{inspect.getdoc(member) or ''}")
                if inspect.isclass(member):
                    parts += [
                        inspect.getdoc(method) or "" for _, method in sorted(vars(member).items()) if callable(method)
                    ]
    return "\n\n".join(part for part in dict.fromkeys(parts) if part)


def windows(files: ModelFiles, num_tokens: int, size: int) -> list[list[int]]:
    tokenizer = Tokenizer.load(files)
    ids = tokenizer.encode(text())
    tokenizer.close()
    if len(ids) < num_tokens:
        raise SystemExit(f"the text has only {len(ids)} tokens")
    return [ids[start : min(start + size, num_tokens)] for start in range(0, num_tokens, size)]


# Ways to compute


def cpu_forward(files: ModelFiles, dtype: torch.dtype, window: int) -> Forward:
    model, config = load_model(files, dtype, lambda stage, percent: None)
    num_blocks = 1 + -(-window // BLOCK_SIZE)
    shape = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)]

    def forward(ids: list[int], start: int) -> torch.Tensor:
        end = start + len(ids)
        positions = torch.arange(start, end)
        batch = ForwardBatch(
            token_ids=torch.tensor(ids),
            positions=positions,
            slots=positions + BLOCK_SIZE,
            query_start_loc=[0, len(ids)],
            seq_lens=[end],
            block_tables=[list(range(1, num_blocks))],
            num_decodes=int(len(ids) == 1),
            sample_rows=torch.arange(len(ids)),
        )
        return model.logits(model.hidden(batch, caches, batch.sample_rows))

    return forward


def gpu_forward(
    files: ModelFiles,
    quantization: Quantization,
    is_kv_float8: bool,
    window: int,
    chunk: int,
    device: torch.device,
    is_head_float8: bool = False,
) -> Forward:
    """With device "cpu" under Triton's interpreter, which is slow and knows no bfloat16: float16 is taken then."""
    from engine.layers.gpu_linear import choose_gpu_method
    from engine.models.gpu_decoder import GpuDecoder
    from engine.models.kv_scales import NUM_TOKENS, measure_kv_scales

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    method = choose_gpu_method(dtype, device, quantization, False)
    head_method = choose_gpu_method(dtype, device, "fp8" if is_head_float8 else "none", False)
    model, config = load_model(files, dtype, lambda stage, percent: None, method, device, head_method)
    assert isinstance(model, Decoder)
    cache_dtype = torch.float8_e4m3fn if is_kv_float8 else dtype
    scales = None
    if is_kv_float8:
        num_tokens = NUM_TOKENS if device.type == "cuda" else 32
        body = GpuDecoder(model, num_tokens, 1, num_tokens, dtype, device).body
        scales = list(zip(*measure_kv_scales(body, config, dtype, device, num_tokens), strict=True))
    decoder = GpuDecoder(model, window, 1, chunk, cache_dtype, device)
    num_blocks = 1 + -(-window // BLOCK_SIZE)
    shape = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    caches = [
        (torch.zeros(shape, device=device).to(cache_dtype), torch.zeros(shape, device=device).to(cache_dtype))
        for _ in range(config.num_layers)
    ]
    tables = torch.arange(1, num_blocks, dtype=torch.int32, device=device)[None].contiguous()
    attended = torch.zeros(chunk, config.num_heads * config.head_dim, dtype=dtype, device=device)
    residual = torch.zeros(chunk, config.hidden_size, dtype=dtype, device=device)

    def forward(ids: list[int], start: int) -> torch.Tensor:
        num = len(ids)
        positions = torch.arange(start, start + num, dtype=torch.int32, device=device)
        batch = DeviceBatch(
            token_ids=torch.tensor(ids, dtype=torch.int32, device=device),
            positions=positions,
            slots=positions + BLOCK_SIZE,
            query_start_loc=torch.tensor([0, num], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([start + num], dtype=torch.int32, device=device),
            seq_slots=torch.zeros(1, dtype=torch.int32, device=device),
            block_tables=tables,
            has_long=num > 1,
        )
        decoder.body(batch, caches, scales, attended[:num], residual[:num])
        logits = torch.empty(num, config.vocab_size, dtype=torch.float32, device=device)
        decoder.head(attended[:num], residual[:num], logits)
        return logits

    return forward


# Figures


@dataclass
class Variant:
    name: str
    forward: Forward
    loss: float = 0.0
    """Sum of minus the logarithms of what the coming tokens were given."""
    num_predicted: int = 0
    divergences: list[torch.Tensor] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.num_predicted)


def chunks(ids: list[int], size: int) -> Iterator[tuple[int, list[int]]]:
    for start in range(0, len(ids), size):
        yield start, ids[start : start + size]


def measure(variants: list[Variant], texts: list[list[int]], chunk: int) -> None:
    """The first variant is the reference. The windows' chunks in turn for all of them."""
    for ids in texts:
        for start, part in chunks(ids, chunk):
            coming = ids[start + 1 : start + len(part) + 1]
            reference: torch.Tensor | None = None
            for variant in variants:
                began = time.perf_counter()
                # float64 sums: a divergence is the small difference of large numbers.
                logprobs = torch.log_softmax(variant.forward(part, start).double(), dim=-1)
                targets = torch.tensor(coming, device=logprobs.device)[:, None]
                variant.loss -= float(logprobs[: len(coming)].gather(1, targets).sum())
                variant.num_predicted += len(coming)
                if reference is None:
                    reference = logprobs
                divergence = (reference.exp() * (reference - logprobs)).sum(dim=-1)
                variant.divergences.append(divergence.cpu())
                variant.seconds += time.perf_counter() - began


def check(reference: Forward, files: ModelFiles, ids: list[int], window: int) -> None:
    """The reference on a GPU against float32 on this machine's CPU; ends the program where they differ."""
    exact = torch.log_softmax(cpu_forward(files, torch.float32, window)(ids, 0).double(), dim=-1)
    found = torch.log_softmax(reference(ids, 0).double().cpu(), dim=-1)
    divergence = float((exact.exp() * (exact - found)).sum(dim=-1).mean())
    print(f"check: bfloat16 on the device against float32 on the CPU, {len(ids)} tokens: mean KL {divergence:.2e}")
    if not divergence < _LARGEST_CHECKED_KL:
        raise SystemExit(f"that is over {_LARGEST_CHECKED_KL}: the device computes something else")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=24576)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument(
        "--kernels", action="store_true", help="on a CPU: the GPU's kernels in Triton's interpreter, for few tokens"
    )
    options = parser.parse_args()
    files = resolve(options.model, lambda stage, percent: None)
    texts = windows(files, options.tokens, options.window)
    device = torch.device(options.device)
    with torch.inference_mode():
        if device.type == "cpu" and not options.kernels:
            variants = [
                Variant("float32", cpu_forward(files, torch.float32, options.window)),
                Variant("bfloat16", cpu_forward(files, torch.bfloat16, options.window)),
            ]
        else:
            kinds: list[tuple[str, Quantization, bool, bool]] = [
                ("bfloat16", "none", False, False),
                ("fp8 KV", "none", True, False),
                ("fp8 weights", "fp8", False, False),
                ("fp8 KV and weights", "fp8", True, False),
                ("fp8 weights, the head's too", "fp8", False, True),
            ]
            variants = [
                Variant(name, gpu_forward(files, weights, is_kv, options.window, options.chunk, device, is_head))
                for name, weights, is_kv, is_head in kinds
            ]
            num_checked = min(_CHECKED_TOKENS, options.chunk, len(texts[0]))
            check(variants[0].forward, files, texts[0][:num_checked], options.window)
        measure(variants, texts, options.chunk)
    reference = variants[0].perplexity
    print(
        f"{files.name}, {sum(map(len, texts))} tokens in windows of {options.window}, chunks of {options.chunk}, "
        f"{device}"
    )
    print("| variant | tokens predicted | perplexity | to the first | mean KL | 99th percentile KL | s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for variant in variants:
        divergences = torch.cat(variant.divergences)
        print(
            f"| {variant.name} | {variant.num_predicted} | {variant.perplexity:.4f} | "
            f"{100 * (variant.perplexity / reference - 1):+.3f} % | {float(divergences.mean()):.2e} | "
            f"{float(divergences.quantile(0.99)):.2e} | {variant.seconds:.1f} |"
        )


if __name__ == "__main__":
    main()
