"""The engine below the loop, driven by a test: the real scheduler and block manager on a real runner."""

import threading
from collections import deque
from collections.abc import Iterable

from engine.executor import Executor, Launch
from engine.kv.audit import audit
from engine.kv.block_manager import BlockManager
from engine.kv.tiers import TierSizes
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Request, Sequence, SequenceOutput
from streamkv.config import PreemptionMode
from streamkv.sampling import SamplingParams

_WAIT_S = 60.0


class DrivenEngine:
    """Greedy generation, with a pool and tiers as small as the test wants them, whatever the runner has room for."""

    def __init__(
        self,
        runner: Executor,
        block_size: int,
        num_blocks: int,
        tiers: TierSizes | None = None,
        mode: PreemptionMode = "auto",
        max_prefill_tokens: int = 0,
    ) -> None:
        """num_blocks: those that can be handed out."""
        limits = SchedulerLimits(16, 256, max_prefill_tokens, 16, True, 2048, 64, (2,), preemption_mode=mode)
        self.runner = runner
        self.blocks = BlockManager(num_blocks + 1, block_size, tiers=tiers)
        self.scheduler = Scheduler(limits, self.blocks, clock=lambda: 0.0)
        self._wake = threading.Event()
        self._num_requests = 0
        self.outputs: list[SequenceOutput] = []
        """All that the steps have brought."""

    def add(self, prompt: list[int], max_tokens: int, n: int = 1, sampling: SamplingParams | None = None) -> Request:
        """sampling: instead of greedy generation of max_tokens."""
        sampling = sampling or SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, n=n)
        request = Request(
            self._num_requests, b"g", self._num_requests.to_bytes(16, "big"), prompt, sampling, arrival_s=0.0
        )
        self._num_requests += 1
        self.scheduler.check(len(prompt), sampling)
        self.scheduler.add(request)
        return request

    def turn(self) -> bool:
        """What one turn of the loop does, a step collected at once → whether there is more to do or to wait for."""
        plan = self.scheduler.plan()
        launch = self.runner.launch(plan, lambda: None) if plan else None
        for transfer in self.scheduler.take_transfers():
            self.runner.start_transfer(transfer, self._wake.set)
        if launch is not None:
            self.outputs += self.scheduler.update(launch.plan, self.runner.collect(launch))
        elif not self.scheduler.num_transfers:
            return False
        else:
            assert self._wake.wait(_WAIT_S), "neither a step nor a transfer has come to its end"
        self._wake.clear()
        self.scheduler.finish_transfers(self.runner.finished_transfers())
        return True

    def pump(self) -> None:
        """Until nothing runs, and nothing is on its way."""
        while self.turn():
            pass
        audit(self.blocks)
        assert self.blocks.num_owned_blocks == 0

    def run(self, prompts: Iterable[tuple[list[int], int]], n: int = 1) -> list[Sequence]:
        """(prompt, max_tokens) of requests that come at once → all their choices, each at its end."""
        requests = [self.add(prompt, max_tokens, n) for prompt, max_tokens in prompts]
        self.pump()
        assert all(request.is_finished for request in requests)
        return [sequence for request in requests for sequence in request.sequences]

    def flush(self) -> None:
        """What the loop does at an asked-for end, without a limit."""
        self.blocks.flush()
        self.pump()


class OverlappedEngine(DrivenEngine):
    """Plans and launches a step while the one before is under way, as the loop does with two in flight."""

    def __init__(self, runner: Executor, block_size: int, num_blocks: int, *, max_prefill_tokens: int = 0) -> None:
        super().__init__(runner, block_size, num_blocks, max_prefill_tokens=max_prefill_tokens)
        self._in_flight: deque[Launch] = deque()

    def turn(self) -> bool:
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append(self.runner.launch(plan, lambda: None))
        if not self._in_flight:
            return False
        if plan is None or len(self._in_flight) == self.runner.max_in_flight:
            launch = self._in_flight.popleft()
            self.outputs += self.scheduler.update(launch.plan, self.runner.collect(launch))
        return True


def generated(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt :]
