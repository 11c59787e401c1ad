"""A training step as a recipe sees it (`Step`), which networks and heads the recipe evaluates on its rows before it
(readings), and the recipe's answer (`Credit`).

A `Step` is three tables: rollouts [R], their turns [T] and their rows [W]. A row is a segment with trained tokens, and
its arrays are as long as the segment [L]. A turn is one call with trained tokens; a rollout's turns are in the order of
its calls. `MASKED` rollouts, which count only in the baseline, are in all tables, with `trained` False. Unscorable
rollouts and those without a reward are in none. Needs only numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltap.contract.trainer import LeasedGroup, RolloutRecord
from rolltap.errors import AlignmentError, ConfigError
from rolltap.token_masks import per_token
from rolltap.trainer_client.data.scoring import baseline, trained_segments
from rolltap.types import NO_VERSION, ROUTED_EXPERTS, Float32, Int32, Scoring, Segment, call_order

RowArrays = tuple[Float32, ...]
"""One array [L] for each row, in the order of `Step.rows`."""

POLICY = "policy"
"""Name of the network in training, with its weights from before the step."""


@dataclass(frozen=True, slots=True)
class ValueHead:
    """A linear map of the policy's last hidden state to one number, read where each trained token is predicted.

    Its loss has no gradient in the policy unless `moves_policy`. It starts at 0, and its gradient is clipped apart from
    the policy's, at its own learning rate `lr`.
    """

    lr: float = 1e-4
    moves_policy: bool = False


@dataclass(frozen=True, slots=True)
class ReadNetwork:
    """A second model that is read and not trained: the one in `folder`, or the run's initial model.

    With `decay` it is an exponential moving average of the policy and its heads, and is saved with checkpoints: every
    `every` steps w becomes decay w + (1 - decay) policy.
    """

    folder: str = ""
    decay: float | None = None
    every: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class RowView:
    """A segment that a network reads in place of row `row`. Its trained tokens are those at `places` of the row."""

    segment: Segment
    row: int
    places: Int32

    def __post_init__(self) -> None:
        trained = int(self.segment.loss_mask.sum())
        if trained != len(self.places):
            raise AlignmentError(f"a view of row {self.row} has {trained} trained tokens for {len(self.places)} places")


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """A reading before `credit`: `network` reads `views`. None: the rows as they are."""

    network: str = POLICY
    views: Sequence[RowView] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPass:
    """A reading before `credit` by another policy of the server: that policy's engine scores the rows.

    The trainer does not load its model. `views` as in `Pass`.
    """

    policy: str
    views: Sequence[RowView] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PolicyReading:
    """A network's outputs at the rows' trained tokens, before the step; 0 elsewhere. `values`: by head."""

    logprobs: RowArrays
    entropy: RowArrays
    values: Mapping[str, RowArrays] = field(default_factory=dict)


Numbers = NDArray[np.float64]

Hint = str | Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class StepRollout:
    """A rollout of the step. `reward` is the rollout's own, with the length penalty; `group` counts from 0."""

    id: str
    group: int
    task: str
    reward: float
    trained: bool
    tokens: int
    roles: Mapping[str, float]
    """Sums of the rewards of scope `role:<name>`, by name."""
    tags: tuple[str, ...]
    replayed: bool = False
    """Whether its group was trained before."""
    hint: Hint = ""
    """The `hint` in the detail of one of its rewards, else the one in the task's spec: text, or token ids."""
    root: str = ""
    """The rollout of its group whose call it continues, or which that one goes back to; "" if it continues none."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTurn:
    """One call with trained tokens.

    `places` are its trained tokens in row `row`. `observed` are the ids of the prompt since the turn before, or since
    the row's start. `index` counts the agent's calls in the rollout's rows, from 0, including those without loss (stale
    ones). `reward` is the sum of the rewards of the call and of spans of it; `rewarded`: whether there are any.
    """

    rollout: int
    row: int
    places: Int32
    observed: Int32
    call_id: str
    agent: str
    index: int
    reward: float
    rewarded: bool


@dataclass(frozen=True, slots=True, eq=False)
class StepRow:
    """A segment with trained tokens, of rollout number `rollout`."""

    rollout: int
    segment: Segment


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """The recipe's arrays for the loss, each with one array [L] for each row of the step.

    `weights` multiply the token weights of `loss.normalise` (0 takes a token out of the loss; None: 1 everywhere). The
    loss gets `extra` as `batch.extra[name]` [M].
    """

    advantages: RowArrays
    weights: RowArrays | None = None
    extra: Mapping[str, RowArrays] = field(default_factory=dict)

    def weighted(self, weights: Sequence[NDArray[Any]]) -> Credit:
        """The same credit, with its weights multiplied by `weights`."""
        own = self.weights or tuple(np.ones_like(row) for row in self.advantages)
        return replace(self, weights=tuple(np.float32(a * b) for a, b in zip(own, weights, strict=True)))

    def carrying(self, **extra: Sequence[NDArray[Any]]) -> Credit:
        """The same credit, with more `extra` arrays."""
        added = {name: tuple(np.asarray(row, np.float32) for row in arrays) for name, arrays in extra.items()}
        return replace(self, extra={**self.extra, **added})


@dataclass(frozen=True, eq=False)
class Step:
    """The training step with number `number`, from 1."""

    number: int
    rollouts: tuple[StepRollout, ...]
    turns: tuple[StepTurn, ...]
    rows: tuple[StepRow, ...]
    readings: Mapping[str, PolicyReading] = field(default_factory=dict)
    tokenizer: Path | None = None
    """The folder of the policy's tokenizer, to encode hints and to read replies as text."""
    images: Mapping[str, bytes] = field(default_factory=dict)
    """The files of the rows' images, by digest."""
    shared: bool = False
    """Whether the rollouts train other policies, too, each in its own run."""

    @cached_property
    def hint_ids(self) -> list[list[int]]:
        """[R] Each rollout's hint as token ids; empty without a hint. Text is encoded without special tokens."""
        texts = any(isinstance(rollout.hint, str) and rollout.hint for rollout in self.rollouts)
        coder = _tokenizer(self.tokenizer, "hints are text", "give hints as token ids") if texts else None
        return [
            coder.encode(rollout.hint, add_special_tokens=False).ids
            if isinstance(rollout.hint, str) and coder is not None
            else [int(token) for token in rollout.hint]
            for rollout in self.rollouts
        ]

    def texts(self, turn: StepTurn, *, observed: bool = False) -> list[str]:
        """The text of each trained (or observed) token of the turn. Part of a character decodes to U+FFFD."""
        ids = turn.observed if observed else self.rows[turn.row].segment.token_ids[turn.places]
        return [self._coder.decode([token], skip_special_tokens=False) for token in ids.tolist()]

    @cached_property
    def _coder(self) -> Any:
        return _tokenizer(self.tokenizer, "the recipe reads replies as text", "choose another recipe")

    def hinted(self) -> list[RowView]:
        """A view of each row of the rollouts with a hint: the hint's ids, then the row."""
        return [
            RowView(_prefixed(row_view.segment, ids), row_view.row, row_view.places)
            for row_view in self.views()
            if (ids := self.hint_ids[self.rows[row_view.row].rollout])
        ]

    @cached_property
    def has_hint(self) -> RowArrays:
        """1 at the trained tokens of rollouts with a hint, 0 elsewhere."""
        return self.broadcast(np.array([bool(ids) for ids in self.hint_ids], np.float32)).advantages

    @cached_property
    def rewards(self) -> Numbers:
        """[R] The rollouts' rewards."""
        return np.array([rollout.reward for rollout in self.rollouts], np.float64)

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """[R] The number of each rollout's group."""
        return np.array([rollout.group for rollout in self.rollouts], np.int64)

    @cached_property
    def turn_rewards(self) -> Numbers:
        """[T] The turns' own rewards, without the rollout's."""
        return np.array([turn.reward for turn in self.turns], np.float64)

    @cached_property
    def turn_rollouts(self) -> NDArray[np.int64]:
        """[T] The number of each turn's rollout."""
        return np.array([turn.rollout for turn in self.turns], np.int64)

    @cached_property
    def turn_groups(self) -> NDArray[np.int64]:
        """[T] The number of each turn's group."""
        return self.groups[self.turn_rollouts]

    @cached_property
    def turn_order(self) -> NDArray[np.int64]:
        """[T] The position of each turn in its rollout, from 1."""
        order = np.zeros(len(self.turns), np.int64)
        for sequence in self.sequences():
            order[sequence] = np.arange(1, len(sequence) + 1)
        return order

    def with_outcome(self, values: Numbers | None = None) -> Numbers:
        """[T] The turns' own rewards (or `values`), plus the rollout's reward at the last turn of each rollout."""
        values_of_turns = (self.turn_rewards if values is None else values).copy()
        for sequence in self.sequences():
            values_of_turns[sequence[-1]] += self.rollouts[self.turns[sequence[0]].rollout].reward
        return values_of_turns

    def with_roles(self) -> Numbers:
        """[T] The turns' own rewards, plus each role's reward at the last turn of the agent of that name."""
        values_of_turns = self.turn_rewards.copy()
        for sequence in self.sequences(by_agent=True):
            last = self.turns[sequence[-1]]
            values_of_turns[sequence[-1]] += self.rollouts[last.rollout].roles.get(last.agent, 0.0)
        return values_of_turns

    def sequences(self, *, by_agent: bool = False) -> list[list[int]]:
        """The numbers of each rollout's turns, in order; with `by_agent`, one list for each agent of a rollout."""
        by_sequence: dict[tuple[int, str], list[int]] = {}
        for number, turn in enumerate(self.turns):
            by_sequence.setdefault((turn.rollout, turn.agent if by_agent else ""), []).append(number)
        return list(by_sequence.values())

    def over_turns(self, values: RowArrays, reduce: Callable[[Float32], float] = np.mean) -> Numbers:
        """[T] `reduce` of each turn's trained tokens in a row array."""
        return np.array([reduce(values[turn.row][turn.places]) for turn in self.turns], np.float64)

    def read_turns(self, values: RowArrays, at: Sequence[int] | None = None) -> Numbers:
        """[T] The value at one trained token of each turn: the one with index `at` (-1: the last), else the first."""
        pairs = zip(self.turns, at or [0] * len(self.turns), strict=True)
        return np.array([values[turn.row][turn.places[index]] for turn, index in pairs], np.float64)

    def broadcast(self, values: NDArray[Any]) -> Credit:
        """Advantages [R] to all trained tokens of each rollout."""
        _check_count("broadcast", values, "rollouts", len(self.rollouts))
        return Credit(tuple(np.where(row.segment.loss_mask, np.float32(values[row.rollout]), 0) for row in self.rows))

    def broadcast_turns(self, values: NDArray[Any]) -> Credit:
        """Advantages [T] to all trained tokens of each turn."""
        _check_count("broadcast_turns", values, "turns", len(self.turns))
        return Credit(self.spread_turns(values))

    def spread_turns(self, values: NDArray[Any]) -> RowArrays:
        """Numbers [T] as row arrays: each at all trained tokens of its turn."""
        arrays = tuple(np.zeros(len(row.segment), np.float32) for row in self.rows)
        for turn, value in zip(self.turns, values, strict=True):
            arrays[turn.row][turn.places] = value
        return arrays

    def place_turns(self, values: NDArray[Any], at: Sequence[int] | None = None) -> RowArrays:
        """Numbers [T] as row arrays: each at one trained token of its turn, 0 elsewhere.

        `at` is the index of the token among the turn's trained ones (-1: the last); by default the first.
        """
        arrays = tuple(np.zeros(len(row.segment), np.float32) for row in self.rows)
        for turn, value, index in zip(self.turns, values, at or [0] * len(self.turns), strict=True):
            arrays[turn.row][turn.places[index]] = value
        return arrays

    def views(self) -> list[RowView]:
        """A view of each row, unchanged."""
        return [
            RowView(row.segment, number, np.flatnonzero(row.segment.loss_mask).astype(np.int32))
            for number, row in enumerate(self.rows)
        ]

    def where(self, row: int, place: int) -> str:
        """The rollout and turn of the token at `place` of a row, for error messages."""
        rollout = self.rollouts[self.rows[row].rollout].id
        turn = next((turn for turn in self.turns if turn.row == row and place in turn.places), None)
        return f"rollout {rollout}" if turn is None else f"rollout {rollout}, turn {turn.index} (call {turn.call_id})"


def view(
    groups: Sequence[LeasedGroup], number: int = 1, reward: Callable[[RolloutRecord], float] | None = None
) -> Step:
    """The step of `groups`. `reward` computes a rollout's reward; by default it is the recorded one, or 0."""
    rollouts: list[StepRollout] = []
    turns: list[StepTurn] = []
    rows: list[StepRow] = []
    for position, group in enumerate(groups):
        roots = _roots(group)
        for record in baseline(group):
            segments = trained_segments(record)
            hints = (reward.detail.get("hint") for reward in record.rollout.rewards)
            rollout = StepRollout(
                record.rollout.id,
                position,
                group.task.id,
                (record.reward or 0.0) if reward is None else reward(record),
                record.rollout.scoring is Scoring.SCORED and bool(segments),
                sum(int(segment.loss_mask.sum()) for segment in segments),
                _by_scope(record, "role"),
                group.task.tags,
                group.replay,
                next((hint for hint in hints if hint), group.task.spec.get("hint", "")),
                roots.get(record.rollout.id, ""),
            )
            turns += _turns(record, segments, len(rollouts), len(rows))
            rows += [StepRow(len(rollouts), segment) for segment in segments]
            rollouts.append(rollout)
    shared = any(group.group.trains for group in groups)
    images = {digest: file for group in groups for digest, file in group.images.items()}
    return Step(number, tuple(rollouts), tuple(turns), tuple(rows), images=images, shared=shared)


def _roots(group: LeasedGroup) -> dict[str, str]:
    """By rollout that continues another one of the group, the first of its chain."""
    own = {record.rollout.id: record.rollout.parent for record in group.rollouts}
    parents = {name: parent.rollout_id for name, parent in own.items() if parent and parent.rollout_id in own}
    roots: dict[str, str] = {}
    for name in parents:
        root = name
        while root in parents:
            root = parents[root]
        roots[name] = root
    return roots


def check_credit(credit: Credit, step: Step) -> None:
    """`AlignmentError` if an array is misaligned or not finite at a trained token; it names array, rollout and turn."""
    named = {"advantages": credit.advantages, **{f"extra[{name!r}]": arrays for name, arrays in credit.extra.items()}}
    if credit.weights is not None:
        named["weights"] = credit.weights
    for name, arrays in named.items():
        if len(arrays) != len(step.rows):
            raise AlignmentError(f"the recipe's {name} has {len(arrays)} arrays for the step's {len(step.rows)} rows")
        for index, (array, row) in enumerate(zip(arrays, step.rows, strict=True)):
            if len(array) != len(row.segment):
                where = f"rollout {step.rollouts[row.rollout].id}"
                raise AlignmentError(f"{where}: the recipe's {name} has {len(array)} of {len(row.segment)} tokens")
            bad = np.flatnonzero(~np.isfinite(array) & row.segment.loss_mask)
            if len(bad):
                raise AlignmentError(f"{step.where(index, bad[0])}: the recipe's {name} is {array[bad[0]]}")


def _check_count(method: str, values: NDArray[Any], of: str, count: int) -> None:
    if len(values) != count:
        raise AlignmentError(f"{method} takes {count} numbers, one for each of the step's {of}; it got {len(values)}")


def _turns(record: RolloutRecord, segments: Sequence[Segment], rollout: int, first_row: int) -> Iterator[StepTurn]:
    """The record's trained calls in the order in which they were made (`call_order`)."""
    rewards = _by_scope(record, "call", "span")
    order = {call_id: place for place, call_id in enumerate(call_order(record.trajectory))}
    spans = [
        (order[span.call_id], row, number)
        for row, segment in enumerate(segments)
        for number, span in enumerate(segment.turns)
        if segment.loss_mask[span.start : span.end].any()
    ]
    agents = {span.call_id: span.agent for segment in segments for span in segment.turns}
    indices: dict[str, int] = {}
    seen: dict[str, int] = {}
    for call_id in sorted(agents, key=order.__getitem__):
        agent = agents[call_id]
        indices[call_id] = seen.get(agent, 0)
        seen[agent] = indices[call_id] + 1
    for _, row, number in sorted(spans):
        segment = segments[row]
        span = segment.turns[number]
        before = segment.turns[number - 1].end if number else 0
        yield StepTurn(
            rollout,
            first_row + row,
            (np.flatnonzero(segment.loss_mask[span.start : span.end]) + span.start).astype(np.int32),
            segment.token_ids[before : span.start],
            span.call_id,
            span.agent,
            indices[span.call_id],
            rewards.get(span.call_id, 0.0),
            span.call_id in rewards,
        )


def _tokenizer(folder: Path | None, why: str, otherwise: str) -> Any:
    from tokenizers import Tokenizer  # here: a step without text needs none

    if folder is None or not (folder / "tokenizer.json").exists():
        raise ConfigError(f"{why}, but {folder} has no tokenizer.json: put it there, or {otherwise}")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _prefixed(segment: Segment, ids: Sequence[int]) -> Segment:
    """`ids`, without loss, then the segment. Turns and recorded experts are left out: the longer prompt routes anew."""
    front = np.asarray(ids, np.int32)
    none = np.zeros(len(front), np.float32)
    return Segment(
        np.concatenate([front, segment.token_ids]),
        np.concatenate([none > 0, segment.loss_mask]),
        np.concatenate([none, segment.logprobs]),
        np.concatenate([np.full(len(front), NO_VERSION, np.int32), segment.versions]),
        (),
        extras=per_token(
            {name: array for name, array in segment.extras.items() if name != ROUTED_EXPERTS},
            lambda _, array: np.concatenate([np.zeros((len(front), *array.shape[1:]), array.dtype), array]),
        ),
        images=tuple(
            replace(each, start=each.start + len(front), end=each.end + len(front)) for each in segment.images
        ),
    )


def _by_scope(record: RolloutRecord, *kinds: str) -> dict[str, float]:
    """Sums of the rewards whose scope is `<kind>:<name>` or `<kind>:<name>:...`, by name."""
    sums: dict[str, float] = {}
    for reward in record.rollout.rewards:
        kind, _, rest = reward.scope.partition(":")
        if kind in kinds:
            name = rest.partition(":")[0] if kind == "span" else rest
            sums[name] = sums.get(name, 0.0) + reward.value
    return sums
