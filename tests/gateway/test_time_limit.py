"""Code that does not come back is ended, and nothing else is."""

import contextlib
import itertools
import threading
import time
from pathlib import Path

import pytest

from gateway import chat_template
from gateway.chat_template import ChatMessage
from gateway.time_limit import TimeIsOver, TimeLimit
from gateway.tokenizer import Tokenizer
from streamkv.errors import InvalidField
from tests.support.small_tokenizers import train_byte_level, write_folder

LOOPS = {
    "without a word": "{% for a in m %}{% for b in m %}{% for c in m %}{% for d in m %}{% for e in m %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
    "of calls": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "that prints": "{% for a in range(100000) %}{% for b in range(1000) %}{% endfor %}x{% endfor %}",
}


def spin() -> None:
    for _ in itertools.count():
        with contextlib.suppress(Exception):
            sum(range(10))


def test_a_loop_that_catches_everything_is_ended() -> None:
    begun = time.monotonic()
    with pytest.raises(TimeIsOver), TimeLimit(0.1):
        spin()
    assert 0.09 < time.monotonic() - begun < 20


def test_nobody_is_ended_who_is_through_in_time() -> None:
    for limit_s in (0.0, 0.001, 0.002):
        for _ in range(50):
            try:
                with TimeLimit(limit_s):
                    time.sleep(0.001)
            except TimeIsOver:
                pass
            time.sleep(0)  # what comes too late would be raised here, or further down
    for _ in range(1000):
        sum(range(10))


def test_only_the_thread_that_entered_it_is_ended() -> None:
    ended: list[str] = []

    def run() -> None:
        try:
            with TimeLimit(0.05):
                spin()
        except TimeIsOver:
            ended.append("it")

    thread = threading.Thread(target=run)
    thread.start()
    until_s = time.monotonic() + 20
    while not ended:
        assert time.monotonic() < until_s
        sum(range(100))
    thread.join()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_template_that_loops_is_ended(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.2)
    template = "{% set m = [1] * 1000 %}" + LOOPS[loop]
    folder = write_folder(tmp_path / "model", train_byte_level(), template, eos_token="<|im_end|>")
    tokenizer = Tokenizer.load(folder)
    with pytest.raises(InvalidField, match=r"longer than 0\.2 s"):
        tokenizer.encode_chat([ChatMessage("user", "x")])
    tokenizer.close()
