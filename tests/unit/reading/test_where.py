"""`where` means the same in SQL, over the index, and in Python, which exports and segments use."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rolltap.errors import DatasetError
from rolltap.reading.index import FIELDS, SessionIndex, index_row, session_value
from rolltap.reading.types import SessionQuery, SessionSummary
from rolltap.reconstructor.exporters.where import COMPARE, MAX_DEPTH, parse_parts
from rolltap.record import selection_of
from rolltap.types import LogVerdict

DAY = 86_400.0
DAYS = ("2026-02-28", "2026-03-01", "2026-03-02", "0001-01-01", "9999-12-31")
FIRST = 1_772_323_200.0  # 2026-03-01T00:00Z
WORDS = ("", "a", "A", "ab", "a b", "a]b", "[ab]", "a*", "ä", "a\nb", "^", "codex", "match", "none", "evaluation")
PATTERNS = ("*", "a*", "?", "[!a]*", "[^a]", "[a", "[]a]*", "a\nb", "*]*", "[a-c]?", "[[]ab]")
NUMBERS = (0, 1, 2, -1, 0.5, 1e300)

words = st.sampled_from(WORDS)
some = st.none() | words
sessions = st.lists(
    st.builds(
        SessionSummary,
        id=st.uuids().map(str),
        policy=words,
        created_at=st.sampled_from([FIRST, FIRST - 1, FIRST - 1e-3, FIRST + 0.25, FIRST + DAY, FIRST + 2 * DAY]),
        expires_at=st.just(0.0),
        rollout_id=some,
        group_id=some,
        task_id=some,
        status=some,
        harness=words,
        models=st.lists(words, max_size=2).map(tuple),
        tags=st.dictionaries(st.sampled_from(["k", "x.y"]), words, max_size=2),
        purpose=words,
        calls=st.sampled_from([0, 1, 2]),
        breaks=st.sampled_from([0, 1]),
        reward=st.none() | st.sampled_from([0.0, 0.5, 1.0, -1.0]),
        log_check=st.sampled_from(LogVerdict),
        labels=st.lists(words, max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda summary: summary.id,
)


def quoted(text: str) -> str:
    return f'"{text}"'


@st.composite
def conditions(draw: st.DrawFn) -> str:
    field = draw(st.sampled_from([*FIELDS, "tag.k", "tag.x.y"]))
    kind = FIELDS[field.partition(".")[0]]
    if kind == "number":
        if draw(st.booleans()):
            return f"{field} in ({', '.join(map(str, draw(st.lists(st.sampled_from(NUMBERS), min_size=1))))})"
        return f"{field}{draw(st.sampled_from(list(COMPARE)))}{draw(st.sampled_from(NUMBERS))}"
    if kind == "date":
        moments = st.sampled_from([*DAYS, "2026-03-01T00:00", "2026-03-01T00:00:00.25", "2026-03-01T01:00+01:00"])
        if draw(st.booleans()):
            return f"{field} not in ({', '.join(map(quoted, draw(st.lists(moments, min_size=1, max_size=3))))})"
        return f"{field}{draw(st.sampled_from(list(COMPARE)))}{quoted(draw(moments))}"
    op = draw(st.sampled_from(["=", "!=", "~", " in ", " not in "]))
    if op == "~":
        return f"{field}~{quoted(draw(st.sampled_from(PATTERNS) | words))}"
    if "in" in op:
        return f"{field}{op}({', '.join(map(quoted, draw(st.lists(words, min_size=1, max_size=3))))})"
    return f"{field}{op}{quoted(draw(words))}"


wheres = st.recursive(
    conditions(),
    lambda inner: (
        st.builds("not ({})".format, inner)
        | st.builds("({}) and ({})".format, inner, inner)
        | st.builds("({}) or ({})".format, inner, inner)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SessionIndex:
    index = SessionIndex(tmp_path_factory.mktemp("index") / "index.db")
    index.open()
    return index


ONE = SessionSummary("s", "p", FIRST, 0.0)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sessions, st.lists(words, max_size=2), st.lists(wheres, min_size=1, max_size=2))
@example([ONE], [], ["not reward>0"])
@example([ONE], [], ["not (reward>0 or status=a)"])
@example([ONE], [], ['harness!=""'])
@example([ONE], [], ["date>9999-12-31 or date=2026-03-01"])
def test_sql_and_python_choose_the_same_sessions(
    index: SessionIndex, summaries: list[SessionSummary], group_tags: list[str], where: list[str]
) -> None:
    ids = [summary.id for summary in summaries]
    with closing(index._connect()) as connection:  # those of the example before
        connection.execute("DELETE FROM sessions")
    index.put(ids, [index_row(summary, group_tags) for summary in summaries], {})

    found, total = index.page(SessionQuery(where=tuple(where)))

    parts = parse_parts(where, FIELDS)
    chosen = {each.id for each in summaries if all(part.holds(session_value(each, group_tags)) for part in parts)}
    assert {summary.id for summary in found} == chosen
    assert total == len(chosen)


@given(wheres)
def test_what_a_part_says_of_itself_means_the_same(where: str) -> None:
    (part, *_) = parse_parts([where], FIELDS)
    again = parse_parts([part.text], FIELDS)
    held = [each.holds(session_value(ONE, ["a"])) for each in again]
    assert part.holds(session_value(ONE, ["a"])) == all(held)


def test_a_long_list_and_a_deep_nesting(index: SessionIndex) -> None:
    """SQLite's own limit of 1,000 levels is not reached: a list is one comparison, a nesting refused."""
    index.put(["s"], [index_row(ONE, ())], {})
    began = time.process_time()
    many = f"session in ({', '.join(str(number) for number in range(5000))}, s)"
    labels = f"label not in ({', '.join(str(number) for number in range(5000))})"
    assert index.page(SessionQuery(where=(many, labels)))[1] == 1
    assert time.process_time() - began < 3  # 7 where each value is a comparison
    deep = "not " * MAX_DEPTH + "calls=0"
    with pytest.raises(DatasetError, match="nested"):
        index.page(SessionQuery(where=(deep,)))
    with pytest.raises(DatasetError, match="nested"):
        index.page(SessionQuery(where=("(" * 5000 + "calls=0" + ")" * 5000 + " or " + "not " * 5000 + "calls=0",)))


def test_fields_of_sessions_and_of_segments_may_be_joined() -> None:
    selection = selection_of(("reward>=0.5 and (length<10 or harness=codex)", "tag=a"))
    assert selection.query.where == ("reward>=0.5", "tag=a")
    assert [part.text for part in selection.segments] == ["(length<10 or harness=codex)"]
    with pytest.raises(DatasetError, match=r"tag\.NAME"):
        selection_of(("length<10 or tag=a",))
