"""What an exporter is given and what it gives: sessions with their trajectories in, rows out.

An exporter is one file and one line in `rolltap.reconstructor.exporters.EXPORTERS`. It sees a group at a time, knows
nothing of files, splits or secrets (`dataset` does), and imports nothing of the proxy: conversations come as
messages in OpenAI's chat form (`role`, `content`, `reasoning_content`, `tool_calls`, `tool_call_id`, `name`), with a
tool call's arguments as an object where they are JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from rolltap.types import Call, CallSpan, Int32, Reward, Rollout, Segment, Session, Task, Trajectory

Message = Mapping[str, Any]
Container = Literal["jsonl", "parquet"]


@dataclass(frozen=True, slots=True, eq=False)
class CallText:
    """A call as its harness saw it. `reply` is None where the call gave none."""

    messages: Sequence[Message]
    reply: Message | None
    tools: Sequence[Mapping[str, Any]] = ()
    created_at: float = 0.0
    finished_at: float | None = None
    dialect: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    usage: Mapping[str, int] = field(default_factory=dict)

    @property
    def conversation(self) -> list[Message]:
        """The messages with the reply."""
        return [*self.messages, *([self.reply] if self.reply is not None else [])]


@dataclass(frozen=True, slots=True, eq=False)
class ExportItem:
    """A session with what became of it. `reward` is the sum of the rollout-scope rewards, None while there is none."""

    session: Session
    trajectory: Trajectory
    calls: Mapping[str, Call]
    texts: Mapping[str, CallText]
    rollout: Rollout | None = None
    task: Task | None = None
    reward: float | None = None
    rewards: Sequence[Reward] = ()
    harness: str = ""
    tags: Sequence[str] = ()

    @property
    def group_id(self) -> str | None:
        return self.rollout.group_id if self.rollout is not None else None

    @property
    def task_id(self) -> str:
        """The task, or the session where there is none: what a split keeps together."""
        return self.task.id if self.task is not None else self.session.id

    @property
    def rows(self) -> list[Segment]:
        """The segments that carry loss."""
        return [segment for segment in self.trajectory.segments if segment.loss_mask.any()]

    def labels(self) -> dict[str, Any]:
        """What every row says of where it comes from."""
        return {
            "session_id": self.session.id,
            "rollout_id": self.rollout.id if self.rollout is not None else None,
            "group_id": self.group_id,
            "task_id": self.task.id if self.task is not None else None,
            "reward": self.reward,
        }

    def conversation(self, segment: Segment) -> CallText | None:
        """The conversation that a segment's last trained call ends; None where the log holds no text of it."""
        return self.texts.get(last_span(segment).call_id)


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """What stands behind a row of messages: the conversation, and the tokens that the engine saw and sampled."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    token_ids: Int32


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A line of a dataset. Rows with the same `content` are duplicates; None says that a row never is one.

    `texts` is the text that stands behind the row's token ids, where it holds any; `rendered` the tokens behind its
    messages, where a trainer will render these anew.
    """

    values: Mapping[str, Any]
    content: Any = None
    texts: Sequence[Any] = ()
    rendered: Rendered | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A rollout or segment that has no row in this format; counted by `reason` in the manifest."""

    reason: str


class Exporter(Protocol):
    """One format. `faithful` says whether its rows hold the sampled tokens; else a trainer renders messages anew."""

    name: ClassVar[str]
    containers: ClassVar[tuple[Container, ...]]  # the first is the default
    faithful: ClassVar[bool]

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | Skipped]:
        """The rows of the rollouts of one group (or of one session that has no group)."""
        ...

    def schema(self) -> Mapping[str, str]:
        """The columns for Parquet and their types, as `writers.TYPES` names them."""
        ...


def last_span(segment: Segment) -> CallSpan:
    """The segment's last trained turn; its last one where none is trained."""
    trained = [turn for turn in segment.turns if turn.trained]
    return (trained or segment.turns)[-1]


def trained_spans(segment: Segment) -> list[CallSpan]:
    return [turn for turn in segment.turns if turn.trained]
