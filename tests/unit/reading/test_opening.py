"""A session's first user message, found in requests of every dialect, behind what harnesses put before it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.calllog.outlines import LONGEST_OPENING, OPENING_CHARS, opening_of

ASKED = "Fix the failing test.\nIt is in tests/."
SAID = "Fix the failing test. It is in tests/."
REMINDER = "<system-reminder>\nToday is <b>Monday</b>.\n</system-reminder>"
ENVIRONMENT = "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>"
INSTRUCTIONS = "# AGENTS.md instructions for /work\n\n<INSTRUCTIONS>\nBe terse.\n</INSTRUCTIONS>"


def text(role: str, *texts: str, kind: str = "text") -> dict[str, Any]:
    return {"role": role, "content": [{"type": kind, "text": each} for each in texts]}


@pytest.mark.parametrize(
    "items",
    [
        pytest.param([{"role": "system", "content": "Be good."}, {"role": "user", "content": ASKED}], id="chat"),
        pytest.param([text("developer", "Be good."), text("user", ASKED)], id="chat-parts"),
        pytest.param([text("user", REMINDER, ASKED)], id="claude-code"),
        pytest.param([text("user", f"{REMINDER}\n{ENVIRONMENT}\n{ASKED}")], id="one-text"),
        pytest.param(
            [
                {"type": "message", **text("user", INSTRUCTIONS, kind="input_text")},
                {"type": "message", **text("user", ENVIRONMENT, kind="input_text")},
                {"type": "message", **text("user", ASKED, kind="input_text")},
            ],
            id="codex",
        ),
        pytest.param([ASKED], id="responses-text"),
        pytest.param([{"role": "user", "parts": [{"text": ENVIRONMENT}, {"text": ASKED}]}], id="gemini"),
        pytest.param([{"parts": [{"text": ASKED}]}], id="gemini-without-a-role"),
        pytest.param(
            [{"role": "user", "content": [{"type": "image", "source": {}}, {"type": "text", "text": ASKED}]}],
            id="image",
        ),
    ],
)
def test_the_users_own_words_are_found(items: list[Any]):
    assert opening_of([json.dumps(item).encode() for item in items]) == SAID


@pytest.mark.parametrize(
    ("items", "opening"),
    [
        ([], ""),
        ([b""], ""),
        ([b"{", b"\xff", b"[1]", b"null"], ""),
        ([b'{"role": "assistant", "content": "x"}', b'{"role": "user", "content": "y"}'], ""),
        ([json.dumps({"role": "user", "content": ENVIRONMENT}).encode()], " ".join(ENVIRONMENT.split())),
        ([json.dumps({"role": "user", "content": "<b>bold</b> claims"}).encode()], "claims"),
        ([json.dumps({"role": "user", "content": "<open and never closed"}).encode()], "<open and never closed"),
        ([json.dumps({"role": "user", "content": None}).encode()], ""),
        ([json.dumps({"role": "user", "content": {"text": 7}}).encode()], ""),
    ],
)  # fmt: skip
def test_what_holds_no_words_of_a_user(items: list[bytes], opening: str):
    assert opening_of(items) == opening


@given(
    st.lists(
        st.recursive(
            st.none() | st.text() | st.integers(),
            lambda inner: (
                st.lists(inner) | st.dictionaries(st.sampled_from(["role", "content", "parts", "text"]), inner)
            ),
        ),
        max_size=4,
    )
)
def test_nothing_that_a_client_sends_breaks_it(items: list[Any]):
    opening = opening_of([json.dumps(item).encode() for item in items])
    assert len(opening) <= OPENING_CHARS
    assert "\n" not in opening


def test_a_large_message_of_tags_takes_no_time():
    hostile = (
        "<a>" * LONGEST_OPENING,
        "<a></a>" * LONGEST_OPENING,
        "<" * LONGEST_OPENING,
        "<a " + "b " * LONGEST_OPENING,
    )
    for text in hostile:
        assert opening_of([json.dumps({"role": "user", "content": text}).encode()])
