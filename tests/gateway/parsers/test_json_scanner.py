"""An object ends where JSON says, and nothing that JSON forbids gets through."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.parsers.json_scanner import PLAIN_RUN, JsonScanner

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)
objects = st.dictionaries(st.text(), values, max_size=4)


def num_taken(text: str) -> tuple[int, bool]:
    """(characters taken until one is refused, whether the object is done)."""
    scanner = JsonScanner()
    for index, character in enumerate(text):
        if not scanner.take(character):
            return index, scanner.is_done
    return len(text), scanner.is_done


@settings(max_examples=40)
@given(objects, st.sampled_from([None, 0, 2]), st.booleans(), st.text())
def test_an_object_is_taken_to_its_last_bracket_and_no_further(
    value: dict[str, object], indent: int | None, ensure_ascii: bool, after: str
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
    assert num_taken(text + after) == (len(text), True)
    assert num_taken(text[:-1]) == (len(text) - 1, False)


@given(st.text(alphabet='{}[]",:0123456789-+.eEtrufalsn \\u"\n', max_size=30))
def test_what_is_taken_as_a_whole_is_json_and_what_is_refused_is_not(text: str) -> None:
    num, is_done = num_taken("{" + text)
    taken = ("{" + text)[:num]
    if is_done:
        assert isinstance(json.loads(taken, strict=False), dict)
    else:
        with pytest.raises(ValueError):
            json.loads("{" + text, strict=False)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"a": 01}', '{"a": 0'),
        ('{"a": 1.}', '{"a": 1.'),
        ('{"a": .5}', '{"a": '),
        ('{"a": +1}', '{"a": '),
        ('{"a": 1e}', '{"a": 1e'),
        ('{"a": -}', '{"a": -'),
        ('{"a": 1,}', '{"a": 1,'),
        ('{"a" 1}', '{"a" '),
        ("{'a': 1}", "{"),
        ('{"a": nul}', '{"a": nul'),
        ('{"a": True}', '{"a": '),
        ('{"a": "\\x"}', '{"a": "\\'),
        ('{"a": "\\u12G4"}', '{"a": "\\u12'),
        ('{"a": [1 2]}', '{"a": [1 '),
        ('{"a": [1}', '{"a": [1'),
        ('[{"a": 1}]', ""),
    ],
)
def test_the_first_wrong_character_is_refused(text: str, taken: str) -> None:
    assert num_taken(text) == (len(taken), False)


def test_brackets_may_be_deeper_than_python_calls_go() -> None:
    text = '{"a":' + "[" * 20_000 + "]" * 20_000 + "}"
    assert num_taken(text) == (len(text), True)


@given(st.text())
def test_a_run_inside_a_string_changes_nothing(text: str) -> None:
    scanner = JsonScanner()
    for character in '{"key": "':
        assert scanner.take(character)
    match = PLAIN_RUN.match(text)
    for character in match.group() if match is not None else "":
        assert scanner.in_string and scanner.take(character)
    assert scanner.in_string
