"""An engine without a model that says what a test wants, whatever it is asked."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from engine.plan import NewSequence
from engine.simulation.simulated_model import VALUE_BYTES, SimulatedModel, logprob
from gateway.tokenizer import Tokenizer
from streamkv.sampling import Grammar
from tests.support.scripted_executor import ScriptedExecutor


class _SpeakingModel(SimulatedModel):
    """Samples from texts that are set; end-of-sequence at their end."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], texts: list[list[int]]) -> None:
        super().__init__(vocab_size, eos_token_ids)
        object.__setattr__(self, "texts", texts)

    def sample(self, values: bytes, facts: NewSequence) -> tuple[int, float]:
        texts: list[list[int]] = self.texts  # type: ignore[attr-defined]
        position = len(values) // VALUE_BYTES
        text, place = texts[facts.choice % len(texts)], position - facts.num_prompt
        token_id = text[place] if place < len(text) else self.eos_token_ids[0]
        return token_id, logprob(token_id, position)


class SpeakingExecutor(ScriptedExecutor):
    """Every request's first choice is the first of `texts`, its second the second, and so on around. Special tokens in
    them are these tokens. Every grammar is taken, kept in `asked_for`, and changes nothing."""

    def __init__(self, tokenizer: Tokenizer, *texts: str, **settings: Any) -> None:
        super().__init__(vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids, **settings)
        self._tokenizer = tokenizer
        self._texts: list[list[int]] = []
        self.asked_for: list[Grammar] = []
        self.model = self.device.model = _SpeakingModel(tokenizer.vocab_size, self.eos_token_ids, self._texts)
        self.say(*texts)

    def say(self, *texts: str) -> None:
        """From the next request on."""
        self._texts[:] = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def say_tokens(self, *texts: Sequence[int]) -> None:
        self._texts[:] = [list(text) for text in texts]

    def compile_grammar(self, grammar: Grammar, on_done: Callable[[], None]) -> Future[object]:
        self.asked_for.append(grammar)
        compiled: Future[object] = Future()
        compiled.set_result(grammar)
        on_done()
        return compiled
