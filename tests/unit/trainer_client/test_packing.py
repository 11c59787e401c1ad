"""Packs: nothing is lost, padded or doubled, budgets hold, and what begins alike is there once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import LEAST_SHARED, Pack, PackedRow, Packer

from .making import segment


@st.composite
def rollouts(draw: st.DrawFn) -> list[PackedRow]:
    """Rows of rollouts whose segments branch off one another at random places."""
    alphabet = st.integers(0, 3)
    trunk = draw(st.lists(alphabet, min_size=2, max_size=60))
    made: list[list[int]] = [trunk]
    found = []
    for index in range(draw(st.integers(1, 5))):
        for _ in range(draw(st.integers(1, 3))):
            parent = draw(st.sampled_from(made))
            kept = parent[: draw(st.integers(1, len(parent)))]
            ids = kept + draw(st.lists(alphabet, min_size=1, max_size=30))
            made.append(ids)
            trained = draw(st.sets(st.integers(1, len(ids) - 1), min_size=1))
            found.append(PackedRow.uniform(segment(ids, sorted(trained)), index, len(found), float(index + 1), 0.1))
    return found


PACKERS = st.builds(Packer, budget=st.integers(1, 200), share=st.booleans(), whole=st.booleans())


def seen_by(pack: Pack, place: int) -> list[int]:
    """The tokens that the token at `place` attends to, itself included, in the order of its attention."""
    span = next(span for span in pack.spans if span.start <= place < span.end)
    before = [pack.spans[index] for index in span.ancestors]
    places = [at for one in before for at in range(one.start, one.end)] + list(range(span.start, place + 1))
    return pack.token_ids_N[places].tolist()


@given(rollouts(), PACKERS)
def test_every_token_sees_its_own_row_up_to_itself(made: list[PackedRow], packer: Packer) -> None:
    packs = packer(made)
    rows = [row for pack in packs for row in pack.rows]
    assert sorted(map(id, made)) == sorted(map(id, rows))
    for pack in packs:
        for row, places in zip(pack.rows, pack.places, strict=True):
            assert pack.position_ids_N[places].tolist() == list(range(len(row)))
            for index in {0, len(row) // 2, len(row) - 1}:
                assert seen_by(pack, int(places[index])) == row.token_ids[: index + 1].tolist()


@given(rollouts(), PACKERS)
def test_only_what_must_stand_alone_is_over_the_budget(made: list[PackedRow], packer: Packer) -> None:
    for pack in packer(made):
        alone = len({row.rollout for row in pack.rows}) == 1 if packer.whole else len(pack.rows) == 1
        assert len(pack) <= packer.budget or alone


@given(rollouts(), st.integers(1, 200), st.booleans())
def test_rollouts_stay_whole_when_asked(made: list[PackedRow], budget: int, share: bool) -> None:
    packs = Packer(budget, share=share, whole=True)(made)
    homes = [{row.rollout for row in pack.rows} for pack in packs]
    assert sum(map(len, homes)) == len(set().union(*homes))


@given(rollouts(), PACKERS)
def test_each_trained_token_is_one_entry_after_its_predecessor(made: list[PackedRow], packer: Packer) -> None:
    total = 0
    for pack in packer(made):
        batch = collate(pack)
        total += batch.trained_tokens
        entry = 0
        for row, places in zip(pack.rows, pack.places, strict=True):
            for index in np.flatnonzero(row.segment.loss_mask):
                assert int(batch.sources_U[batch.states_M[entry]]) == places[index - 1]
                assert int(batch.targets_M[entry]) == row.token_ids[index]
                assert float(batch.advantages_M[entry]) == row.advantages[index]
                assert int(batch.rollouts_M[entry]) == row.rollout
                entry += 1
    assert total == sum(int(row.segment.loss_mask.sum()) for row in made)


def test_a_common_beginning_is_computed_once() -> None:
    trunk = list(range(40))
    segments = [segment([*trunk, 50 + index, 60 + index], [40, 41]) for index in range(8)]
    made = [PackedRow.uniform(one, index, index, 1.0, 0.1) for index, one in enumerate(segments)]
    (shared,) = Packer(1000, share=True)(made)
    (plain,) = Packer(1000)(made)
    assert (len(shared), len(plain)) == (40 + 8 * 2, 8 * 42)
    assert len(shared.spans) == 9


@pytest.mark.parametrize(("length", "spans"), [(LEAST_SHARED - 1, 2), (LEAST_SHARED, 3)])
def test_beginnings_too_short_to_matter_are_not_shared(length: int, spans: int) -> None:
    made = [PackedRow.uniform(segment([*range(length), 40 + last], [length]), last, last, 1.0, 0.1) for last in (0, 1)]
    (pack,) = Packer(1000, share=True)(made)
    assert len(pack.spans) == spans


def test_short_rows_fill_the_room_that_long_ones_leave() -> None:
    lengths = [70, 20, 60, 30, 40, 50]
    made = [PackedRow.uniform(segment([index % 7 for index in range(n)], [n - 1]), n, 0, 1.0, 0.1) for n in lengths]
    assert [len(pack) for pack in Packer(100)(made)] == [100, 100, 70]
