"""Frames between the user's bytes: split anywhere, merged, and never confused with output of a script."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.launcher.remote.messages import PART_BYTES, Decoder, frame

TOKEN = "0a1b2c"


def taken_apart(stream, cuts):
    """(the user's bytes, the messages) of a stream that arrives in pieces."""
    decoder, user, messages, at = Decoder(TOKEN), b"", [], 0
    for cut in [*sorted(cuts), len(stream)]:
        for piece in decoder.feed(stream[at:cut]):
            if isinstance(piece, bytes):
                user += piece
            else:
                messages.append(piece)
        at = cut
    return user + decoder.rest(), messages


pieces = st.lists(
    st.one_of(
        st.binary(max_size=20),
        st.sampled_from([b"\x1e", b"\x1f\n", b"\x1e0a1b", b"\r50%", b"\n"]),
        st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=2),
    ),
    max_size=8,
)


@given(pieces, st.lists(st.integers(0, 3000), max_size=6))
def test_any_mixture_cut_anywhere_comes_apart_again(parts, cuts):
    stream = b"".join(p if isinstance(p, bytes) else frame(TOKEN, p) for p in parts)
    user, messages = taken_apart(stream, [min(cut, len(stream)) for cut in cuts])
    wanted = [p for p in parts if isinstance(p, dict)]
    assert messages == wanted
    assert user == b"".join(p for p in parts if isinstance(p, bytes))


def test_a_long_message_is_cut_into_parts_that_other_hosts_may_come_between():
    one = {"sender": "a", "text": "x" * 3 * PART_BYTES}
    two = {"sender": "b", "text": "y" * 2 * PART_BYTES}
    first = frame(TOKEN, one).split(b"\x1f\n")[:-1]
    second = frame(TOKEN, two).split(b"\x1f\n")[:-1]
    assert all(len(part) + 2 == 1024 for part in first + second), "a line that srun passes on whole"
    merged = [part for pair in zip(first, second, strict=False) for part in pair]
    merged += first[len(second) :]
    user, messages = taken_apart(b"".join(part + b"\x1f\n" for part in merged), [])
    assert (user, messages) == (b"", [two, one])


def test_a_part_that_another_host_s_come_into_is_mended():
    one, two, three = ({"sender": name, "text": "x" * 400} for name in "abc")
    whole = frame(TOKEN, one)
    for cut in (20, 700, 1023):
        middle = whole[:cut] + frame(TOKEN, two) + frame(TOKEN, three) + whole[cut:]
        user, messages = taken_apart(b"before" + middle + b"after", [5, 300, 1100, 2000])
        assert sorted(messages, key=str) == [one, two, three], cut
        assert user == b"beforeafter"


def test_a_part_that_is_torn_is_dropped_and_what_follows_is_not():
    one, two = {"sender": "a", "text": "x" * 3000}, {"sender": "a", "kind": "beat"}
    torn = frame(TOKEN, one)
    stream = torn[:1500] + b"output" + torn[1500:] + frame(TOKEN, two) + torn
    assert taken_apart(stream, [])[1] == [two, one]


def test_what_a_script_prints_is_not_taken_for_a_frame():
    forged = frame("guess", {"kind": "ended"})
    user, messages = taken_apart(forged, [3, 9])
    assert user == forged and not messages


@pytest.mark.parametrize("name", ["h 1", "a;b", "ü", "", "user@host-1"])
def test_any_host_name_may_be_the_sender(name):
    message = {"sender": name, "kind": "beat"}
    assert taken_apart(frame(TOKEN, message), [])[1] == [json.loads(json.dumps(message))]
