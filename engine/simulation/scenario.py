"""What a seed stands for: an engine's settings, at least 50 requests, and what goes wrong. Plain data.

Small on purpose: short prompts over pools of a few dozen blocks, so that memory runs out, prefixes meet at every offset
and each seed costs a fraction of a second.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Final

from engine.simulation.executor import Disturbance
from engine.simulation.simulated_model import SimulatedModel, end_one_in
from engine.simulation.step_cost import StepCost
from streamkv.config import PreemptionMode
from streamkv.sampling import SamplingParams

NUM_REQUESTS: Final = 50
_MAX_BLOCKS: Final = 60
"""An audit, of which there are some hundred, looks at every block."""
_LATEST_FAULT_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The engine of a scenario."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_in_flight: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    max_num_partial_prefills: int
    enable_chunked_prefill: bool
    max_queue: int
    enable_prefix_caching: bool
    num_host_blocks: int
    num_disk_blocks: int
    preemption_mode: PreemptionMode
    itl_target_s: float
    ageing_s: float
    vocab_size: int
    eos_odds: int
    is_calibrated: bool
    """The engine knows from the start what its steps take."""
    cost: StepCost
    disturbance: Disturbance

    @property
    def model(self) -> SimulatedModel:
        return SimulatedModel(self.vocab_size, (2,), end_one_in(self.eos_odds))

    @property
    def max_running(self) -> int:
        """Sequences at once."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_len(self) -> int:
        """Most tokens of a sequence."""
        return min(self.max_model_len, (self.num_blocks - 1) * self.block_size)


@dataclass(slots=True)
class Pause:
    """The reader is slow: from so long after the submission, for so long; inf: to the very end."""

    after_s: float
    for_s: float


@dataclass(slots=True)
class ClientRequest:
    """What a client sends, and what it does then."""

    index: int
    prompt: list[int]
    sampling: SamplingParams
    at_s: float
    previous: int = -1
    """The request whose next turn it is: it is sent at_s after that one has ended. -1: at_s on the clock."""
    priority: int = 0
    deadline_s: float = inf
    """After the submission."""
    tenant: str = ""
    cache_salt: str = ""
    shares_prefix: bool = False
    fails_at: dict[int, int] = field(default_factory=dict)
    """choice → how many tokens it generates before its logits are no numbers."""
    abort_after_s: float = inf
    abort_choice: int = -1
    pauses: list[Pause] = field(default_factory=list)

    @property
    def namespace(self) -> tuple[str, str]:
        """Within which prefixes may be shared."""
        return "" if self.shares_prefix else self.tenant, self.cache_salt


@dataclass(slots=True)
class Restart:
    """The engine ends and another begins, with the same disk."""

    at_s: float
    takes_s: float
    is_asked: bool
    """It may write to disk what it has cached, for as long as it takes."""
    keeps_disk: bool


@dataclass(slots=True)
class Scenario:
    """A run, wholly."""

    seed: int
    setup: EngineSetup
    requests: list[ClientRequest]
    restarts: list[Restart]
    meddle_odds: float
    """Chance in each turn that some live request is aborted, paused or resumed, whatever it is doing."""


def make_scenario(seed: int, num_requests: int = NUM_REQUESTS) -> Scenario:
    """The scenario of a seed. Equal seeds give equal scenarios."""
    return _Author(seed).write(num_requests)


class _Author:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._dice = random.Random(f"scenario {seed}")
        self._setup = self._engine()
        self._model = self._setup.model

    def write(self, num_requests: int) -> Scenario:
        dice = self._dice
        requests = list(self._requests(num_requests))
        restarts: list[Restart] = []
        if dice.random() < (0.5 if self._setup.num_disk_blocks else 0.25):
            at_s = 0.0
            for _ in range(dice.choice((1, 1, 2, 3))):
                at_s += dice.uniform(0.02, _LATEST_FAULT_S)
                restarts.append(Restart(at_s, dice.uniform(0.0, 0.5), dice.random() < 0.5, dice.random() < 0.8))
        meddle_odds = dice.choice((0.0, 0.0, 0.01, 0.05, 0.2))
        return Scenario(self._seed, self._setup, requests, restarts, meddle_odds)

    # the engine

    def _engine(self) -> EngineSetup:
        dice = self._dice
        block_size = dice.choice((1, 2, 3, 4, 4, 5, 8, 8, 16, 32))
        longest = dice.choice((24, 40, 64, 100))
        fits_one = -(-longest // block_size)
        pool_len = dice.choice((max(2, fits_one - 1), fits_one, fits_one + 1, fits_one * 3 // 2 + 1, fits_one * 3))
        num_blocks = 1 + min(pool_len, max(_MAX_BLOCKS, fits_one))
        budget = dice.choice((1, 4, 8, 16, 16, 32, 64, 200))
        is_caching = dice.random() < 0.9
        num_host_blocks = dice.choice((0, 2, num_blocks // 2 + 1, num_blocks * 2)) if is_caching else 0
        num_disk_blocks = dice.choice((0, 3, num_blocks, num_blocks * 3)) if num_host_blocks else 0
        if num_disk_blocks > 3:
            num_host_blocks = dice.choice((2, num_blocks // 2 + 1))
        modes: tuple[PreemptionMode, ...] = (
            ("auto", "recompute", "swap", "swap") if num_host_blocks else ("auto", "recompute")
        )
        cost = StepCost(
            base_s=dice.choice((0.001, 0.005, 0.02)),
            weights_s=dice.choice((0.0, 0.005)),
            token_s=dice.choice((0.0, 0.0002, 0.002)),
            pair_s=dice.choice((0.0, 1e-6, 1e-5)),
            kv_token_s=dice.choice((0.0, 1e-6, 1e-5)),
            block_copy_s=1e-5,
            host_bytes_per_s=dice.choice((1e4, 1e6, 1e7)),
            disk_bytes_per_s=dice.choice((1e3, 1e5, 1e6)),
        )
        has_faults = dice.random() < 0.5
        disturbance = Disturbance(
            jitter=dice.choice((0.0, 0.2, 1.0)),
            slow_step_odds=dice.choice((0.0, 0.02)) if has_faults else 0.0,
            slow_transfer_odds=dice.choice((0.0, 0.1)) if has_faults else 0.0,
            damage_odds=dice.choice((0.0, 0.05, 0.5)) if has_faults else 0.0,
            full_odds=dice.choice((0.0, 0.1)) if has_faults else 0.0,
        )
        return EngineSetup(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=longest,
            max_in_flight=dice.choice((1, 2)),
            max_num_seqs=dice.choice((1, 2, 4, 8, 16, 64)),
            max_num_batched_tokens=budget,
            max_prefill_tokens=dice.choice((0, 0, 1, 5, 16)),
            max_num_partial_prefills=dice.choice((1, 2, 4, 8)),
            enable_chunked_prefill=dice.random() < 0.8,
            max_queue=dice.choice((8, *[1000] * 7)),
            enable_prefix_caching=is_caching,
            num_host_blocks=num_host_blocks,
            num_disk_blocks=num_disk_blocks,
            preemption_mode=dice.choice(modes),
            itl_target_s=dice.choice((0.0, 0.0, 0.01, 0.05)),
            ageing_s=dice.choice((0.05, 0.5, 30.0)),
            vocab_size=dice.choice((40, 1000)),
            eos_odds=dice.choice((8, 25, 1000)),
            is_calibrated=dice.random() < 0.7,
            cost=cost,
            disturbance=disturbance,
        )

    # the clients

    def _requests(self, num_requests: int) -> Iterator[ClientRequest]:
        dice, max_len = self._dice, self._setup.max_len
        gap_s = dice.choice((0.002, 0.02, 0.1))
        burst_len = dice.choice((1, 5, 20, 50))
        tenants = dice.choice((("",), ("", "a"), ("a", "b", "c")))
        salts = dice.choice((("",), ("",), ("", "x")))
        priorities = dice.choice(((0,), (0,), (-1, 0, 1), (0, 5)))
        fault_odds = dice.choice((0.0, 0.1, 0.3))
        roots = [self._ids(dice.randint(1, max(1, max_len * 3 // 4))) for _ in range(dice.choice((1, 3, 6)))]
        so_far: list[ClientRequest] = []
        ends_chat: set[int] = set()
        now_s = 0.0
        for index in range(num_requests):
            if index % burst_len == 0:
                now_s += dice.expovariate(1.0 / (gap_s * burst_len))
            elif dice.random() < 0.5:
                now_s += dice.expovariate(1.0 / gap_s) * 0.1
            request = None
            if so_far and dice.random() < 0.3:
                request = self._next_turn(index, dice.choice(so_far), ends_chat)
            if request is None:
                prompt = self._prompt(roots, so_far)[: max_len - 1]
                request = ClientRequest(index, prompt, self._sampling(index, len(prompt)), now_s)
                request.tenant, request.cache_salt = dice.choice(tenants), dice.choice(salts)
                request.shares_prefix = dice.random() < 0.2
                request.priority = dice.choice(priorities)
            if dice.random() < fault_odds:
                self._add_faults(request)
            so_far.append(request)
            yield request

    def _ids(self, count: int) -> list[int]:
        return self._dice.choices(range(3, self._setup.vocab_size), k=count)

    def _prompt(self, roots: list[list[int]], so_far: list[ClientRequest]) -> list[int]:
        """Prompts part at every depth; tails of two different tokens meet often."""
        dice, max_len = self._dice, self._setup.max_len
        tail = dice.choices((3, 4), k=dice.randint(0, 6))
        match dice.randrange(8):
            case 0:
                return self._ids(dice.randint(1, max_len))
            case 1:
                return self._ids(dice.randint(1, 6))
            case 2 | 3:
                root = dice.choice(roots)
                return root[: dice.randint(0, len(root))] + (tail or [5])
            case 4 if so_far:
                return dice.choice(so_far[-8:]).prompt
            case 5 | 6:
                return [*dice.choice(roots), *tail]
            case _ if so_far:
                other = dice.choice(so_far)
                tokens = other.prompt + self._answer(other)
                return tokens[: dice.randint(1, len(tokens))] + tail
            case _:
                return self._ids(5)

    def _answer(self, request: ClientRequest) -> list[int]:
        """What its first sequence generates, or for beams something like it."""
        ending = self._model.generate(
            request.prompt, request.sampling, 0, self._setup.max_len, namespace=request.namespace
        )
        return ending.token_ids

    def _next_turn(self, index: int, previous: ClientRequest, ends_chat: set[int]) -> ClientRequest | None:
        """The last prompt, the answer, and more; None if that is too long or was asked before."""
        dice = self._dice
        prompt = previous.prompt + self._answer(previous) + self._ids(dice.randint(1, 8))
        if len(prompt) >= self._setup.max_len or previous.index in ends_chat:
            return None
        ends_chat.add(previous.index)
        return ClientRequest(
            index,
            prompt,
            self._sampling(index, len(prompt)),
            dice.choice((0.0, 0.0, 0.05, 0.5)),
            previous.index,
            previous.priority,
            tenant=previous.tenant,
            cache_salt=previous.cache_salt,
            shares_prefix=previous.shares_prefix,
        )

    def _sampling(self, index: int, num_prompt: int) -> SamplingParams:
        dice = self._dice
        max_tokens = dice.choice((1, 5, dice.randint(1, 12), dice.randint(1, 40), dice.randint(20, 60)))
        min_tokens = dice.choice((0, 0, 0, dice.randint(0, max_tokens)))
        n = dice.choice((1, 1, 1, 1, 1, 2, 3))
        best_of = beam_width = 0
        num_sequences = n + dice.choice((0, 1, 2))
        if num_sequences <= self._setup.max_running:
            best_of, beam_width = dice.choice(((0, 0),) * 8 + ((num_sequences, 0), (0, num_sequences)))
        told = random.Random(f"told {self._seed} {index}")
        return SamplingParams(
            seed=index,
            max_tokens=max_tokens,
            min_tokens=max(0, min(min_tokens, self._setup.max_len - num_prompt)),
            n=n,
            best_of=best_of,
            beam_width=beam_width,
            length_penalty=dice.choice((1.0, 0.0, -1.0, 2.0)) if beam_width else 1.0,
            temperature=0.0 if beam_width else dice.choice((0.0, 1.0)),
            stop_token_ids=dice.choices(range(self._setup.vocab_size), k=dice.choice((0, 0, 1, 2))),
            ignore_eos=dice.random() < 0.4,
            frequency_penalty=0.0 if beam_width else told.choice((0.0, 0.0, 0.0, 0.5)),
            logprobs=-1 if beam_width else told.choice((-1, -1, -1, 0, 3)),
            prompt_logprobs=told.choice((-1, -1, -1, -1, 0, 2)),
        )

    def _add_faults(self, request: ClientRequest) -> None:
        dice = self._dice
        soon = (0.0, dice.uniform(0.0, 0.05), dice.uniform(0.0, 0.5), dice.uniform(0.0, _LATEST_FAULT_S))
        match dice.randrange(6):
            case 0:
                request.abort_after_s = dice.choice(soon)
            case 1:
                request.abort_after_s = dice.choice(soon)
                request.abort_choice = dice.randrange(request.sampling.n)
            case 2:
                request.deadline_s = dice.choice(soon)
            case 3:
                choice = 0 if request.sampling.beam_width else dice.randrange(request.sampling.num_sequences)
                request.fails_at = {choice: dice.randrange(request.sampling.max_tokens)}
            case _:
                for _ in range(dice.choice((1, 1, 3))):
                    for_s = dice.choice((dice.uniform(0.0, 0.05), dice.uniform(0.0, 1.0), inf))
                    request.pauses.append(Pause(dice.choice(soon), for_s))
