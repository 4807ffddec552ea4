"""How well steps are predicted on a GPU: python tests/bench/step_times.py [flags of `streamkv engine`]

Loads the model as the engine does, fits the latency model to what the warm-up measured, and compares its predictions
with the samples themselves, with other steps, and with steps that hold as much of a prompt as the model allows for a
target gap. Times are of one step alone, from the plan to the tokens on the host; `in a row` are decodes as they follow
each other in a steady batch, two under way at once.
"""

import os
import statistics
import sys
import time

import torch

from engine.execution.gpu_runner import GpuRunner
from engine.execution.warm_up import StepShape, WarmUp, Workload
from engine.plan import NewSequence, ScheduledSequence, StepLoad, StepPlan
from engine.scheduling.latency import LatencyModel
from streamkv import config
from streamkv.sampling import SamplingParams

OTHERS = (
    StepShape(4, 500, 0, 0),
    StepShape(32, 1500, 0, 0),
    StepShape(100, 700, 0, 0),
    StepShape(200, 700, 0, 0),
    StepShape(0, 0, 150, 0),
    StepShape(0, 0, 700, 500),
    StepShape(0, 0, 3000, 0),
    StepShape(0, 0, 6000, 0),
    StepShape(0, 0, 500, 6000),
    StepShape(8, 300, 100, 0),
    StepShape(32, 1000, 400, 1500),
    StepShape(200, 400, 1500, 0),
)
TARGETS_S = (0.03, 0.015)


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


class Bench:
    def __init__(self, settings: config.EngineConfig) -> None:
        self.settings = settings
        self.runner = GpuRunner(settings, torch.device("cuda"))
        self.facts, self.limits = self.runner.load(lambda stage, percent: None)
        self.model = LatencyModel(
            self.limits.step_samples, self.limits.block_bytes, self.limits.host_bytes_per_s, self.limits.token_buckets
        )

    def measure(self, shapes: tuple[StepShape, ...]) -> list[tuple[StepLoad, float]]:
        """Steps with their seconds, without the prompt that comes first."""
        limits = self.limits
        warm_up = WarmUp(
            self.runner._step,
            limits.block_size,
            limits.max_model_len,
            self.settings.max_num_seqs,
            limits.max_num_batched_tokens,
            workload=Workload(16, shapes, most_runs=4, longest_s=20.0, has_slow_starts=True),
            num_blocks=limits.num_blocks,
        )
        warm_up.run(lambda percent: None)
        return [(load, seconds) for load, seconds in warm_up.samples if load != StepLoad().with_chunk(16, 0)]

    def compare(self, name: str, measured: list[tuple[StepLoad, float]]) -> None:
        row(name, "decodes", "their KV tokens", "prompt tokens", "behind", "measured ms", "predicted ms", "error")
        errors = []
        for load, seconds in measured:
            predicted_s = self.model.predict_s(load)
            errors.append(predicted_s / seconds - 1)
            row(
                "", load.num_decodes, load.num_decode_kv_tokens, load.num_prefill_tokens, load.num_prefill_kv_tokens,
                f"{seconds * 1e3:.2f}", f"{predicted_s * 1e3:.2f}", f"{100 * errors[-1]:+.1f} %",
            )  # fmt: skip
        mean = statistics.mean(map(abs, errors))
        row("", "", "", "", "", "", "mean of errors' sizes", f"{100 * mean:.1f} %")

    def chunks(self) -> None:
        shapes = []
        for target_s in TARGETS_S:
            for num_decodes, context, prompt_context in (
                (1, 500, 0),
                (32, 1000, 0),
                (32, 1000, 4096),
                (128, 500, 2000),
            ):
                decodes = StepLoad(num_decodes=num_decodes, num_decode_kv_tokens=num_decodes * (context + 1))
                num_tokens = self.model.prefill_tokens_within(target_s, decodes, prompt_context)
                shapes.append(StepShape(num_decodes, context, num_tokens, prompt_context))
        names = [f"{1e3 * target_s:.0f} ms" for target_s in TARGETS_S]
        self.compare(f"chunks for {' and '.join(names)}, 4 each", self.measure(tuple(shapes)))

    def in_a_row(self) -> None:
        row("decodes in a row", "context", "ms a step", "predicted ms", "error")
        num_steps = 40
        for num_decodes, context in ((1, 256), (64, 512), (min(256, self.settings.max_num_seqs), 512)):
            context = min(context, self.limits.max_model_len - num_steps - 1)
            seconds = self._decode(num_decodes, context, num_steps)
            kv_tokens = num_decodes * (context + num_steps // 2)
            predicted_s = self.model.predict_s(StepLoad(num_decodes=num_decodes, num_decode_kv_tokens=kv_tokens))
            error = 100 * (predicted_s / seconds - 1)
            row(num_decodes, context, f"{seconds * 1e3:.2f}", f"{predicted_s * 1e3:.2f}", f"{error:+.1f} %")

    def _decode(self, num_decodes: int, context: int, num_steps: int) -> float:
        """Seconds a step, two under way at once."""
        blocks = -(-(context + num_steps + 1) // self.limits.block_size)
        ids = [-1_000_000 - num_decodes * 1000 - i for i in range(num_decodes)]
        sampling = SamplingParams(seed=0, max_tokens=num_steps)
        under_way = []
        times_s = []
        for step in range(num_steps):
            plan = StepPlan(
                0,
                [
                    ScheduledSequence(
                        sequence_id, context + step, 1, False, True, [] if step else [0],
                        [] if step else [1 + i * blocks + n for n in range(blocks)],
                    )
                    for i, sequence_id in enumerate(ids)
                ],
                new_sequences=[NewSequence(sequence_id, 0, sampling, context, ()) for sequence_id in ids if not step],
            )  # fmt: skip
            under_way.append(self.runner.launch(plan, lambda: None))
            if len(under_way) == 2:
                self.runner.collect(under_way.pop(0))
                times_s.append(time.perf_counter())
        self.runner.collect(under_way.pop())
        self.runner._step(StepPlan(0, [], finished_sequence_ids=ids))
        return (times_s[-1] - times_s[4]) / (len(times_s) - 5)


def main() -> None:
    bench = Bench(config.load(config.EngineConfig, sys.argv[1:], os.environ))
    print(f"{bench.facts.name} on {torch.cuda.get_device_name()}: {bench.limits.num_blocks} blocks")
    bench.compare("samples", bench.limits.step_samples)
    bench.compare("others", bench.measure(OTHERS))
    bench.in_a_row()
    bench.chunks()
    sys.stdout.flush()
    bench.runner.close()


if __name__ == "__main__":
    main()
