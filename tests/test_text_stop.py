"""Stop strings: whatever the pieces of the text, it ends before the first one, and nothing of it is shown."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.text.stop import StopStrings


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By the definition: the first end of a stop string, and of those that end there the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
)
def test_any_pieces(pieces: list[str], stops: list[str]) -> None:
    filter_ = StopStrings(stops)
    text, shown = "", ""
    for piece in pieces:
        text += piece
        shown += filter_.push(piece)
        truth, found = expected(text, stops)
        assert filter_.found == found
        assert truth.startswith(shown)
        held = truth[len(shown) :]
        assert found is not None or held == "" or any(stop.startswith(held) for stop in stops)
        if found is not None:
            assert shown == truth
    shown += filter_.flush()
    assert shown == expected(text, stops)[0]


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        ((), ["a", "b"], ["a", "b"]),
        (("\n\n",), ["a\n", "b", "\n", "\nc"], ["a", "\nb", "", ""]),
        (("STOP",), ["ST", "A", "STO", "P!"], ["", "STA", "", ""]),
        (("bc", "abcd"), ["ab", "cd"], ["", "a"]),  # bc is complete first
        (("b", "ab"), ["a", "b"], ["", ""]),  # both at once: the longest
    ],
)
def test_examples(stops: tuple[str, ...], pieces: list[str], shown: list[str]) -> None:
    filter_ = StopStrings(stops)
    assert [filter_.push(piece) for piece in pieces] == shown


def test_a_long_one_needs_no_more_memory_than_it_has() -> None:
    tracemalloc.start()
    filter_ = StopStrings(["a" * 100_000 + "b"])
    assert [filter_.push(piece) for piece in ("c", "a" * 50, "a", "b")] == ["c", "", "", "a" * 51 + "b"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
