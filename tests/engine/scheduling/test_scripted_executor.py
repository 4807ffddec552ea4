"""The scripted executor: threads, faults and times around the simulated device, whose own tests are beside it."""

import threading

import pytest

from engine.simulation.device import PlanViolation
from engine.simulation.simulated_model import end_after
from streamkv.sampling import SamplingParams
from tests.engine.simulation.plans import entry, facts, plan_of
from tests.support.scripted_executor import InjectedFault, ScriptedExecutor

GREEDY = SamplingParams(seed=0, max_tokens=20, temperature=0.0)


def test_steps_run_on_a_thread_and_say_when_they_are_done():
    executor = ScriptedExecutor(16, 4, 60, step_s=0.05, max_in_flight=2)
    done = threading.Event()
    first = executor.launch(plan_of(0, entry(1, 0, [5, 6], [1]), new_sequences=[facts(1, 2)]), done.set)
    assert not first.is_done
    second = executor.launch(plan_of(1, entry(1, 2, [], [], num_tokens=1)), lambda: None)
    with pytest.raises(PlanViolation, match="in flight"):
        executor.launch(plan_of(2, entry(1, 3, [], [], num_tokens=1)), lambda: None)
    assert done.wait(5)
    assert first.is_done
    tokens = executor.collect(first).token_ids + executor.collect(second).token_ids
    assert tokens == executor.expected_tokens([5, 6], 2)
    executor.close()
    executor.close()


def test_a_fault_is_raised_by_collect():
    executor = ScriptedExecutor(16, 4, 60, fail_at_step=0)
    launch = executor.launch(plan_of(0, entry(1, 0, [5], [1]), new_sequences=[facts(1)]), lambda: None)
    with pytest.raises(InjectedFault):
        executor.collect(launch)
    executor.close()


def test_load_reports_progress_and_says_what_fits():
    executor = ScriptedExecutor(16, 4, 60, 500, eos_token_ids=(2, 3), load_s=0.01)
    seen: list[float] = []
    model, limits = executor.load(lambda stage, percent: seen.append(percent))
    executor.close()
    assert seen == [0.0, 50.0, 100.0]
    assert (model.vocab_size, model.eos_token_ids, model.max_model_len) == (500, [2, 3], 60)
    assert (limits.num_blocks, limits.block_size, limits.max_model_len) == (16, 4, 60)


def test_what_is_expected_follows_the_rules_for_ends():
    executor = ScriptedExecutor(16, 4, 60, threaded=False, eos_rule=end_after(3))
    prompt = [5, 6, 7]
    tokens, reason, cause = executor.expected_output(prompt, GREEDY)
    assert (len(tokens), tokens[-1], reason, cause) == (4, 2, "stop", "eos")
    later = SamplingParams(seed=0, max_tokens=20, min_tokens=6, temperature=0.0)
    assert len(executor.expected_output(prompt, later)[0]) == 7
    endless = SamplingParams(seed=0, max_tokens=500, ignore_eos=True, temperature=0.0)
    tokens, reason, _ = executor.expected_output(prompt, endless)
    assert (len(tokens), reason) == (57, "length")
    drawn = SamplingParams(seed=0, max_tokens=20, n=2)
    assert executor.expected_tokens(prompt, 3, drawn, 0) != executor.expected_tokens(prompt, 3, drawn, 1)
