"""One event is one line, whatever the values hold."""

import io
import logging
import sys

import pytest

from streamkv import log
from streamkv.log import KeyValueFormatter, fields, format_value


def line_of(**values: log.Value) -> str:
    record = logging.LogRecord("engine.loop", logging.WARNING, "f", 1, "request ended", (), None)
    record.__dict__.update(fields(**values))
    return KeyValueFormatter("engine").format(record)


def test_a_line_has_level_component_event_and_fields() -> None:
    line = line_of(request_id="req-1", reason="stop", num_tokens=17, seconds=0.5, nothing=None, is_ok=True)
    assert line.startswith("time=20") and " level=warning component=engine logger=engine.loop " in line
    assert line.endswith('event="request ended" request_id=req-1 reason=stop num_tokens=17 seconds=0.5 is_ok=True')


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ("", '""'),
        ("two words", '"two words"'),
        ('say "x"', '"say \\"x\\""'),
        ("a=b", '"a=b"'),
        ("back\\slash", '"back\\\\slash"'),
        ("line\nlevel=error", '"line\\nlevel=error"'),
        ("\x1b[31m\r\x00\u2028\u202e", '"\\x1b[31m\\r\\x00\\u2028\\u202e"'),
        ("Grüße", '"Grüße"'),
        ("\ud800", '"\\ud800"'),
        (b"\x01\xff", "01ff"),
        (b"", '""'),
        (1 / 3, "0.333333"),
    ],
)
def test_no_value_can_begin_a_line_or_a_field_of_its_own(value: log.Value, text: str) -> None:
    assert format_value(value) == text
    assert len(line_of(x=value).splitlines()) == 1


def test_a_traceback_stays_on_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    line = KeyValueFormatter("engine").format(record)
    assert len(line.splitlines()) == 1 and "ValueError: two\\nlines" in line


def test_configure_sets_the_level_and_takes_other_libraries_lines_in() -> None:
    stream, root = io.StringIO(), logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        log.configure("warning", "gateway", stream)
        logging.getLogger("another.library").warning("watch out for %s", "it")
        logging.getLogger("another.library").info("chatter")
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = stream.getvalue().splitlines()
    assert 'component=gateway logger=another.library event="watch out for it"' in line
