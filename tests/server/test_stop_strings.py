import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.server.stop_strings import StopStrings

TEXTS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str], keep: bool) -> tuple[str, str | None]:
    """The promise, letter by letter: generation ends with the first letter that completes a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None


@given(TEXTS, STOPS, st.data(), st.booleans())
@settings(max_examples=300)
def test_text_ends_before_the_first_stop_string_however_it_is_cut_into_pieces(text, stops, data, keep):
    matcher = StopStrings(stops, keep)
    shown, rest = "", text
    while rest and matcher.found is None:
        size = data.draw(st.integers(1, len(rest)))
        shown += matcher.feed(rest[:size])
        rest = rest[size:]
    shown += matcher.flush()
    assert (shown, matcher.found) == cut(text, stops, keep)


@given(TEXTS, STOPS)
def test_no_letter_that_is_shown_is_ever_part_of_a_stop_string(text, stops):
    matcher = StopStrings(stops)
    shown = ""
    for letter in text:
        shown += matcher.feed(letter)
        assert cut(text, stops, keep=False)[0].startswith(shown)


@pytest.mark.parametrize("pieces", [["xabc"], ["x", "abc"], ["xab", "c"], [*"xabc"]])
def test_the_stop_string_that_ends_first_wins_though_another_began_before(pieces):
    matcher = StopStrings(["abc", "b"])
    assert "".join(matcher.feed(piece) for piece in pieces) == "xa"
    assert matcher.found == "b"


def test_only_what_may_begin_a_stop_string_is_held_back():
    matcher = StopStrings(["END"])
    assert matcher.feed("the E") == "the "
    assert matcher.feed("x") == "Ex"
    assert matcher.feed("EN") == ""
    assert matcher.flush() == "EN"
    assert matcher.found is None


def test_nothing_is_shown_after_a_stop_string():
    matcher = StopStrings(["."])
    assert matcher.feed("a.b") == "a"
    assert matcher.feed("c") == ""
    assert matcher.flush() == ""
