"""What a run of the chaos suite did and found."""

from collections import Counter
from dataclasses import dataclass, field

MAX_TOLD = 20


@dataclass
class Report:
    """Counted while it runs. `violations` is what must stay empty."""

    seed: int
    num_streams: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    """What was done to the server and to its streams, by kind."""
    ended: Counter[str] = field(default_factory=Counter)
    """Streams, by how their clients saw them end."""
    num_received: int = 0
    """Tokens that clients were told, of streams that have ended or not."""
    num_tokens: int = 0
    """Compared with the oracle, one by one."""
    num_sampled_tokens: int = 0
    """Of these, drawn at a temperature."""
    num_lost: int = 0
    num_doubled: int = 0
    num_wrong: int = 0
    leaked_blocks: float = -1.0
    busy_gauges: dict[str, float] = field(default_factory=dict)
    engine: dict[str, float] = field(default_factory=dict)
    """Figures of the gateways about their engines, at the end; of those that were killed nothing is left."""
    violations: list[str] = field(default_factory=list)

    def violate(self, text: str) -> None:
        self.violations.append(text)

    def compare(self, token_ids: list[int], expected: list[int], what: str, is_sampled: bool) -> None:
        """A whole choice against the oracle."""
        self.num_tokens += len(expected)
        self.num_sampled_tokens += len(expected) if is_sampled else 0
        if token_ids == expected:
            return
        if len(token_ids) < len(expected):
            self.num_lost += len(expected) - len(token_ids)
        elif len(token_ids) > len(expected):
            self.num_doubled += len(token_ids) - len(expected)
        else:
            self.num_wrong += sum(a != b for a, b in zip(token_ids, expected, strict=True))
        self.violate(f"{what}: {token_ids} instead of {expected}")

    @property
    def is_good(self) -> bool:
        return not self.violations and self.leaked_blocks == 0 and not self.busy_gauges

    def __str__(self) -> str:
        rows = [
            ("seed, streams at once, seconds", f"{self.seed}, {self.num_streams}, {self.seconds:.0f}"),
            *((f"fault: {kind}", str(count)) for kind, count in sorted(self.faults.items())),
            *((f"streams: {kind}", str(count)) for kind, count in sorted(self.ended.items())),
            *((name, f"{value:g}") for name, value in self.engine.items()),
            ("tokens compared with the oracle", str(self.num_tokens)),
            ("of these sampled", str(self.num_sampled_tokens)),
            ("tokens lost", str(self.num_lost)),
            ("tokens doubled", str(self.num_doubled)),
            ("tokens wrong", str(self.num_wrong)),
            ("blocks leaked", f"{self.leaked_blocks:g}"),
            ("gauges that are not back to idle", ", ".join(self.busy_gauges) or "none"),
            ("violations", str(len(self.violations))),
        ]
        lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
        told = self.violations[:MAX_TOLD]
        return "\n".join([*lines, *(f"VIOLATION {text}" for text in told)])
