"""Text → content, reasoning and calls: the same however it was cut, whole at every length, nothing lost."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsers.answer_parser import AnswerParser, Parsing
from gateway.parsers.pieces import Pieces
from gateway.parsers.tool_calls import CallOptions

NAMES = ("get_weather", "now")
ARGUMENTS = {"city": "Zürich\n😀", "days": [1, 2.5e3, None, True], "more": {"quote": '"}\\ <tool_call>'}}
WEATHER = json.dumps(ARGUMENTS, ensure_ascii=False)


@dataclass
class Seen:
    """What a client has got so far."""

    content: str = ""
    reasoning: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def add(self, pieces: Pieces) -> None:
        self.content += "".join(pieces.content)
        self.reasoning += "".join(pieces.reasoning)
        for piece in pieces.calls:
            if piece.name:
                assert piece.index == len(self.names)
                self.names.append(piece.name)
                self.arguments.append("")
            self.arguments[piece.index] += piece.arguments

    @property
    def calls(self) -> list[tuple[str, str]]:
        return list(zip(self.names, self.arguments, strict=True))

    @property
    def everything(self) -> str:
        return self.content + self.reasoning + "".join(self.names) + "".join(self.arguments)


def parsing(
    tool_format: str,
    *,
    parallel: bool = True,
    hidden_marks: tuple[str, ...] = (),
    think: bool = False,
    is_open: bool = False,
) -> Parsing:
    return Parsing(
        tool_format,
        CallOptions(NAMES, parallel),
        splits_reasoning=think,
        begins_in_reasoning=is_open,
        hidden_marks=hidden_marks,
    )


def parse(how: Parsing, *texts: str) -> tuple[Seen, bool]:
    """(all that there is in a text that came in these parts, whether there is a whole call)."""
    parser, seen = AnswerParser(how), Seen()
    for text in texts:
        seen.add(parser.feed(text))
    seen.add(parser.finish())
    return seen, parser.has_calls


def call(tool_format: str, name: str, arguments: str) -> str:
    return {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        "llama3": f'{{"name": "{name}", "parameters": {arguments}}}',
        "tagged": f'<|python_tag|>{{"name": "{name}", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]',
        "named": f"[TOOL_CALLS]{name}[ARGS]{arguments}",
        "with id": f"[TOOL_CALLS]{name}[CALL_ID]a1b2c3d4e[ARGS] {arguments}",
        "bare": f"[TOOL_CALLS]{name}{arguments}",
    }[tool_format]


FORMATS = {
    "hermes": "hermes",
    "llama3": "llama3",
    "tagged": "llama3",
    "mistral": "mistral",
    "named": "mistral",
    "with id": "mistral",
    "bare": "mistral",
}
TWO_CALLS = {
    "hermes": call("hermes", "get_weather", WEATHER) + "\n" + call("hermes", "now", "{}"),
    "llama3": call("llama3", "get_weather", WEATHER) + "; " + call("llama3", "now", "{}"),
    "tagged": call("tagged", "get_weather", WEATHER) + ";" + call("llama3", "now", "{}"),
    "mistral": call("mistral", "get_weather", WEATHER)[:-1] + ', {"name": "now", "arguments": {}}]',
    "named": call("named", "get_weather", WEATHER) + call("named", "now", "{}"),
    "with id": call("with id", "get_weather", WEATHER) + call("with id", "now", "{}"),
    "bare": call("bare", "get_weather", WEATHER) + " " + call("bare", "now", "{}"),
}
every_form = pytest.mark.parametrize("form", FORMATS)


@every_form
def test_a_call_is_its_name_and_its_arguments_as_they_were_written(form: str) -> None:
    seen, has_calls = parse(parsing(FORMATS[form]), call(form, "get_weather", WEATHER))
    assert seen == Seen("", "", ["get_weather"], [WEATHER])
    assert json.loads(seen.arguments[0]) == ARGUMENTS
    assert has_calls


@every_form
def test_calls_follow_each_other(form: str) -> None:
    seen, has_calls = parse(parsing(FORMATS[form]), TWO_CALLS[form])
    assert seen == Seen("", "", ["get_weather", "now"], [WEATHER, "{}"])
    assert has_calls


@every_form
def test_only_the_first_of_several_is_shown_without_parallel_calls(form: str) -> None:
    seen, has_calls = parse(parsing(FORMATS[form], parallel=False), TWO_CALLS[form])
    assert seen == Seen("", "", ["get_weather"], [WEATHER])
    assert has_calls


@every_form
@pytest.mark.parametrize("think", [False, True])
def test_any_cut_of_a_text_shows_the_same_at_that_cut_and_at_the_end(form: str, think: bool) -> None:
    """What is shown after k characters depends on these alone. So a stream that is attached to goes on without loss."""
    text = ("<think>\nhm </thinking>\n</think>\n\n" if think else "") + TWO_CALLS[form] + " Done < now. "
    how = parsing(FORMATS[form], think=think)
    whole, _ = parse(how, text)
    by_character, shown = AnswerParser(how), Seen()
    for end in range(len(text)):
        shown.add(by_character.feed(text[end]))
        parser, seen = AnswerParser(how), Seen()
        seen.add(parser.feed(text[: end + 1]))
        assert seen == shown
        seen.add(parser.feed(text[end + 1 :]))
        seen.add(parser.finish())
        assert seen == whole
        assert parser.has_calls
    assert whole.calls == [("get_weather", WEATHER), ("now", "{}")]
    assert whole.reasoning == ("hm </thinking>" if think else "")


@every_form
def test_a_text_cut_at_any_length_shows_the_call_as_far_as_it_goes(form: str) -> None:
    text = "Look: " + call(form, "get_weather", WEATHER) if form != "llama3" else call(form, "get_weather", WEATHER)
    how = parsing(FORMATS[form])
    for end in range(len(text)):
        seen, has_calls = parse(how, text[:end])
        if seen.calls:
            (name, arguments) = seen.calls[0]
            assert name == "get_weather" and WEATHER.startswith(arguments)
            assert has_calls == (arguments == WEATHER)
            assert seen.content == ("" if form == "llama3" else "Look:")
        else:
            assert seen.content == text[:end] and not has_calls


@every_form
def test_text_before_and_after_calls_is_content_without_the_space_around_them(form: str) -> None:
    seen, _ = parse(parsing(FORMATS[form]), f"  {TWO_CALLS[form]} \n")
    assert (seen.content, len(seen.calls)) == ("", 2)
    seen, _ = parse(parsing(FORMATS[form]), f"{TWO_CALLS[form]}\n\nThat is all. ")
    assert (seen.content, len(seen.calls)) == ("That is all. ", 2)
    if form != "llama3":
        seen, _ = parse(parsing(FORMATS[form]), f" Let me look.\n\n{TWO_CALLS[form]}\nThat is all.")
        assert (seen.content, len(seen.calls)) == (" Let me look.\nThat is all.", 2)


@every_form
def test_text_without_calls_goes_through_as_it_is(form: str) -> None:
    for text in ("", " ", "\n hello < [TOOL <tool_ca <|python world \n", "[1, 2]", "<", "[TOOL_CALLS", "x <tool_call"):
        assert parse(parsing(FORMATS[form]), text) == (Seen(text), False)


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", "<tool_call>get_weather(1)</tool_call> ok"),
        ("hermes", '<tool_call>{"nam": "now", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": []}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "name": "now"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "no\nw", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "' + "x" * 300 + '", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>'),
        ("hermes", "<tool_call></tool_call>"),
        ("llama3", '{"name": "Bob", "parameters": {}}'),
        ("llama3", '{"name": "now"}'),
        ("llama3", '{"city": "Oslo"}'),
        ("llama3", "{}"),
        ("llama3", '<|python_tag|>brave_search.call(query="x")'),
        ("llama3", 'I would call {"name": "now", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] hello there"),
        ("mistral", "[TOOL_CALLS]now[ARGS]x"),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]12 3"),
        ("mistral", "[TOOL_CALLS]now[AR] {}"),
        ("mistral", "[TOOL_CALLS]{}"),
    ],
)
def test_what_turns_out_to_be_no_call_is_content_to_the_last_character(tool_format: str, text: str) -> None:
    for prefix in ("", "first\n") if tool_format != "llama3" else ("",):
        seen, has_calls = parse(parsing(tool_format), prefix + text)
        assert (seen.content, seen.calls, has_calls) == (prefix + text, [], False)


@every_form
def test_a_call_that_breaks_off_ends_there_and_the_rest_is_content(form: str) -> None:
    text = call(form, "now", '{"x": ]}')
    seen, has_calls = parse(parsing(FORMATS[form]), text)
    assert seen.calls == [("now", '{"x": ')]
    assert seen.content == text[text.index("]}") :]
    assert not has_calls


def test_a_call_behind_a_broken_one_is_found() -> None:
    seen, has_calls = parse(parsing("hermes"), "<tool_call>{oh" + call("hermes", "now", "{}"))
    assert (seen.content, seen.calls, has_calls) == ("<tool_call>{oh", [("now", "{}")], True)
    seen, has_calls = parse(parsing("mistral"), "[TOOL_CALLS]now" + call("named", "now", "{}"))
    assert (seen.content, seen.calls, has_calls) == ("[TOOL_CALLS]now", [("now", "{}")], True)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "now"}', "{}"),
        ('{"name": "now", "arguments": null}', "{}"),
        ('{"arguments": {"a": [1]}, "name": "now"}', '{"a": [1]}'),
        ('{"id": "x{", "type": "function", "name": "now", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "n\\u006fw", "arguments": { }}', "{ }"),
        ('{"name": "now", "arguments": {"a": "one\n\ttwo"}}', '{"a": "one\\n\\ttwo"}'),
        ('{"name": "now", "arguments": {"a": 1}', '{"a": 1}'),
        ('{"name": "now", "arguments": {"a": 1}, "id": "x"}', '{"a": 1}'),
    ],
)
def test_a_call_may_be_written_in_several_ways(written: str, arguments: str) -> None:
    for end in ("\n</tool_call>", "</tool_call>", "", " </tool"):
        seen, has_calls = parse(parsing("hermes"), "<tool_call>" + written + end)
        assert (seen.content, seen.calls, has_calls) == ("", [("now", arguments)], True)
        json.loads(seen.arguments[0])


@pytest.mark.parametrize("form", ["hermes", "tagged", "mistral", "named", "with id", "bare"])
def test_a_function_that_is_not_there_is_called_all_the_same_where_a_mark_says_so(form: str) -> None:
    seen, has_calls = parse(parsing(FORMATS[form]), call(form, "no_such", "{}"))
    assert (seen.content, seen.calls, has_calls) == ("", [("no_such", "{}")], True)


MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")


@pytest.mark.parametrize("form", ["hermes", "tagged", "mistral", "named"])
def test_marks_that_are_special_tokens_are_no_content_either(form: str) -> None:
    how = parsing(FORMATS[form], hidden_marks=MARKS, think=True)
    text = "<think>so <tool_call> ends</think>a </think>b " + call(form, "now", "oh") + " [ARGS] <tool"
    seen, _ = parse(how, text)
    expected = text.partition("a ")[2]
    for mark in MARKS:
        expected = expected.replace(mark, "")
    assert seen == Seen("a " + expected, "so  ends")
    assert not AnswerParser(parsing("", hidden_marks=MARKS)).is_plain


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nYes. ", False, "hm\n\nso", "Yes. "),
        ("\n <think>hm</think>Yes", False, "hm", "Yes"),
        ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
        ("hm\n</think>\n\nYes", True, "hm", "Yes"),
        ("\n<think>hm</think>Yes", True, "hm", "Yes"),
        ("</think>Yes", True, "", "Yes"),
        ("hm, for ever\n", True, "hm, for ever", ""),
        ("<think>hm < b </th", False, "hm < b", ""),
        ("<think>a </thin> b</think>c", False, "a </thin> b", "c"),
        ("<think>", False, "", ""),
        ("<thi", False, "", "<thi"),
        (" <<think>x</think>", False, "", " <<think>x</think>"),
        ("Yes, <think> is a mark, </think> too.", False, "", "Yes, <think> is a mark, </think> too."),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("</think>", False, "", "</think>"),
        ("\n", False, "", "\n"),
    ],
)
def test_thoughts_stand_at_the_beginning_between_their_marks(
    text: str, is_open: bool, reasoning: str, content: str
) -> None:
    how = parsing("", think=True, is_open=is_open)
    assert parse(how, text) == (Seen(content, reasoning), False)
    shown = Seen()
    by_character = AnswerParser(how)
    for end, character in enumerate(text):
        shown.add(by_character.feed(character))
        start = AnswerParser(how)
        seen = Seen()
        seen.add(start.feed(text[: end + 1]))
        assert seen == shown


def test_a_call_that_is_only_thought_of_is_none() -> None:
    text = "<think>" + call("hermes", "now", "{}") + "</think>\n" + call("hermes", "get_weather", "{}")
    seen, _ = parse(parsing("hermes", think=True), text)
    assert seen == Seen("", call("hermes", "now", "{}"), ["get_weather"], ["{}"])


def test_without_formats_all_text_is_content_at_once() -> None:
    parser = AnswerParser(Parsing())
    assert parser.is_plain and parser.feed(" <think> ").content == [" <think> "]
    parser = AnswerParser(parsing("", think=True))
    assert not parser.is_plain
    parser.feed("<think>a</think> b")
    assert parser.is_plain


PARTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}", ";",
    ",", '{"name": "now", ', '"arguments": ', '"parameters": ', "now", "{}", '{"a": "b\\"', '"}', " ", "\n", "<think>",
    "</think>", "<", "hello", "é", '"', "null",
]  # fmt: skip
texts = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


@given(
    texts,
    st.sampled_from(["", "hermes", "llama3", "mistral"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_how_a_text_was_cut_makes_no_difference_whatever_is_in_it(
    text: str, tool_format: str, think: bool, is_open: bool, parallel: bool, hides: bool, data: st.DataObject
) -> None:
    marks = MARKS if hides else ()
    how = parsing(tool_format, think=think, is_open=think and is_open, parallel=parallel, hidden_marks=marks)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    in_chunks, by_character = AnswerParser(how), AnswerParser(how)
    left, right = Seen(), Seen()
    for chunk in chunks:
        left.add(in_chunks.feed(chunk))
        for character in chunk:
            right.add(by_character.feed(character))
        assert left == right
    left.add(in_chunks.finish())
    right.add(by_character.finish())
    assert left == right
    assert in_chunks.has_calls == by_character.has_calls


@given(texts.map(lambda text: text.replace("[CALL_ID]", "")), st.sampled_from(["hermes", "llama3", "mistral"]))
def test_no_character_of_words_is_lost_or_doubled(text: str, tool_format: str) -> None:
    """Marks, names of keys and white space may go; what the model said of itself stays, once."""
    seen, _ = parse(parsing(tool_format), text)
    for word in ("hello", "é"):
        assert seen.everything.count(word) == text.count(word)
