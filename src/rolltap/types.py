"""The glossary as types: what a rollout is made of, independent of any store, protocol or trainer.

Only the standard library and numpy are imported here. Per-token arrays are checked where they are made: a
misaligned array raises `AlignmentError` at construction, so no later code needs to pad, cut or guess.

Array names carry their shape: `P` prompt tokens of a call, `T` sampled tokens of a call, `L` tokens of a segment.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltap.errors import AlignmentError
from rolltap.token_masks import MASK_TABLE

Int32 = NDArray[np.int32]

Float32 = NDArray[np.float32]

Bool = NDArray[np.bool_]

NO_VERSION = -1  # the weight version of a token that no engine sampled (prompt tokens)

ROUTED_EXPERTS = "routed_experts"  # the extra with a mixture's experts: of every sampled token, -1 elsewhere


class Outcome(StrEnum):
    """How a call ended. Only `COMPLETED` calls are ever trained."""

    COMPLETED = "completed"
    ABORTED = "aborted"  # the client went away, or the process died before the call was complete
    ENGINE_ERROR = "engine_error"
    REFUSED = "refused"  # the request was never sent to an engine


class Finish(StrEnum):
    """Why sampling stopped."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"


class CallKind(StrEnum):
    """What a call is for. `JUDGE` and `SIMULATOR` calls never carry loss; side calls do where a policy asks."""

    MAIN = "main"
    AUXILIARY = "auxiliary"  # a side call: titles, classifiers, routers, helper models
    SUMMARY = "summary"  # a compaction's summary
    JUDGE = "judge"  # an evaluator's model call
    SIMULATOR = "simulator"  # a simulated user


class BreakReason(StrEnum):
    """Why a call does not extend its parent token for token. A closed vocabulary."""

    NEW_CONVERSATION = "new_conversation"  # shares no message with anything recorded (subagent, side call)
    HISTORY_EDITED = "history_edited"  # a message differs from the record
    SYSTEM_CHANGED = "system_changed"  # the system text differs
    TOOLS_CHANGED = "tools_changed"  # the tool schemas differ
    COMPACTION = "compaction"  # the harness replaced its history by a summary
    THINKING_DROPPED = "thinking_dropped"  # the policy follows a template that drops history thinking
    TEMPLATE_NOT_BRIDGEABLE = "template_not_bridgeable"  # the audit did not admit this template for a role
    IDS_UNKNOWN = "ids_unknown"  # the parent's reply has ids that the tokenizer lacks: its text is rendered
    PARENT_UNFINISHED = "parent_unfinished"  # the parent's turn was not completed
    AMBIGUOUS_PARENT = "ambiguous_parent"  # several recorded calls match and no handle decides
    TOKENS_DIFFER = "tokens_differ"  # the engine's own prompt ids do not extend the parent (chat mode)
    PARENT_NOT_READ = "parent_not_read"  # the store did not answer in time, so calls of other proxies are unknown
    POLICY_CHANGED = "policy_changed"  # another policy, tokenizer or template renders this call


class Flaw(StrEnum):
    """Why a completed call's tokens can't be trained. A closed vocabulary."""

    LOGPROBS_MISSING = "logprobs_missing"
    LOGPROBS_NOT_FINITE = "logprobs_not_finite"
    IDS_UNKNOWN = "ids_unknown"  # the engine sampled an id that the tokenizer lacks, or that stands for images
    TOKENS_MISSING = "tokens_missing"  # the engine returned text without ids
    WEIGHT_ZERO = "weight_zero"  # imported with weight 0: its trace says that it is no target
    TOOL_CALL_UNPARSABLE = "tool_call_unparsable"
    VERSION_UNKNOWN = "version_unknown"
    IMAGES_UNKNOWN = "images_unknown"  # the upstream was shown images, and which ids stand for which is not known


TEXT_FLAWS = (Flaw.TOKENS_MISSING, Flaw.WEIGHT_ZERO)
"""Of replies that are text alone."""


class SamplingFlaw(StrEnum):
    """Why a call's log-probs do not belong to the distribution that a trainer computes. A closed vocabulary."""

    TRUNCATED = "sampling_truncated"  # greedy, under a penalty, or cut by top-p, top-k or min-p without a mask
    UNTEMPERED = "logprobs_untempered"  # sampled at a temperature other than 1; the log-probs' own is 1 or unknown


class RolloutStatus(StrEnum):
    """A rollout is open (`PENDING`, `RUNNING`) or in exactly one terminal state."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def terminal(self) -> bool:
        return self not in (RolloutStatus.PENDING, RolloutStatus.RUNNING)


class Cause(StrEnum):
    """What is to blame if a rollout failed, timed out or was lost."""

    AGENT = "agent"  # it crashed, or ran past its time
    INFRASTRUCTURE = "infrastructure"  # the runtime, the node or the runner
    EVALUATION = "evaluation"  # no evaluator gave a usable reward


class Scoring(StrEnum):
    """What a rollout's reward counts for within its group."""

    SCORED = "scored"
    MASKED = "masked"  # in the baseline, out of the loss
    UNSCORABLE = "unscorable"  # out of the baseline and out of the loss


PURPOSE_TAG = "purpose"

EVALUATION = "eval"  # a session or group tagged `purpose=eval` measures; nothing of it is ever trained


class GroupStatus(StrEnum):
    OPEN = "open"
    COMPLETE = "complete"
    LEASED = "leased"
    ACKNOWLEDGED = "acknowledged"
    STALE = "stale"
    DEAD = "dead"
    DROPPED = "dropped"  # cancelled, or left out by its own rule (deadline, too few usable rollouts, zero variance)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens `[start, end)` of a call came from weights `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Break:
    """Why a call does not extend its parent, and the first index that differs.

    `message_index` counts the request's messages, `token_index` the prompt's tokens. The prompt up to `token_index`
    equals the parent's prompt and output.
    """

    reason: BreakReason
    call_id: str
    parent_id: str | None
    token_index: int
    message_index: int | None = None


@dataclass(frozen=True, slots=True)
class CallShape:
    """What a request looked like apart from its tokens: evidence for the reconstructor's classification."""

    tools: int | None = None  # tools offered; None: not recorded
    toolset: str = ""  # digest of the tools
    system: str = ""  # digest of the leading system text
    replies: int = 0  # assistant messages in the request
    choices: int = 1  # samples that the request asked for (`n`)
    constrained: bool = False  # a grammar or a forced tool call limits what can be sampled
    unapplied: tuple[str, ...] = ()  # fields of the request that were accepted without effect
    asked: str = ""  # digest of tool choice, effort and grammar; "": none. A retry has the same
    manner: str = ""  # the model's name as the client gave it, and whether it reads the reply as a stream
    role: str = ""  # the role that the session's owner gave the caller
    fitted: tuple[str, ...] = ()  # the rules that made the conversation fit the model's template
    quotes: tuple[str, ...] = ()  # recent calls whose reply is quoted in a message that is not a reply
    follows: str = ""  # the call of the history's last reply, if this call extends no call in tokens
    ends: str = ""  # role of the last message that is no system message ("user", "tool", ...); "": not recorded


@dataclass(frozen=True, slots=True)
class InjectedMessage:
    """A message that a rule of the session put into a prompt; `rule` counts the session's message rules.

    `message_index`: the number of the request's messages that stand before it. `place`: the same in the conversation
    as the proxy compares it, without the leading system messages and with the pieces of a reply joined.
    """

    place: int
    message_index: int
    role: str
    text: str
    rule: int


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt: the ids `[start, end)` stand for it.

    `grid`: its patches, as (frames, rows, columns). `digest`: SHA-256 of the image's file, in hex; the record keeps the
    file among the parts of requests.
    """

    start: int
    end: int
    grid: tuple[int, int, int]
    digest: str


def images_differ_at(images: Sequence[PromptImage], others: Sequence[PromptImage]) -> int:
    """The first token that is another image's, or an image's in one of two prompts only; `NO_DIFFERENCE` if none is.

    Ids alone don't tell: all images have the same placeholder.
    """
    if images == others:  # as of nearly all prompts, which have none
        return NO_DIFFERENCE
    pairs = zip_longest(images, others)
    differing = next(pair for pair in pairs if pair[0] != pair[1])
    return min(image.start for image in differing if image is not None)


NO_DIFFERENCE = 1 << 62

TOOLS_NOT_SHOWN = "tools_not_shown"
"""Entry of `CallShape.fitted`: the request offers tools and the model's template writes none."""

NO_SHAPE = CallShape()  # nothing is on record about the request


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One model exchange, an immutable fact.

    `prompt_ids` [P] is exactly what the engine saw, `output_ids` [T] exactly what it sampled (the end-of-turn
    token included where it was sampled). `logprobs` [T] and `versions` belong to the sampled tokens. `shared` is
    the count of leading prompt tokens that equal the parent's prompt followed by its output. `extras` are
    optional per-token arrays with first dimension T (top-k, experts, sampling masks, temperatures other than 1); only
    the table of `rolltap.token_masks` has none.
    `masked`: the sampled tokens `[start, end)` that rules of the session leave without loss, in order and apart.
    `images`: those of the whole prompt, in its order.
    """

    id: str
    session_id: str
    prompt_ids: Int32
    output_ids: Int32
    logprobs: Float32
    versions: tuple[VersionSpan, ...] = ()
    parent_id: str | None = None
    shared: int = 0
    outcome: Outcome = Outcome.COMPLETED
    finish: Finish = Finish.STOP
    kind: CallKind = CallKind.MAIN
    policy: str = ""
    agent: str = ""  # the harness's name for the agent within the session; "": the main agent
    break_: Break | None = None
    flaw: Flaw | None = None
    sampling_flaw: SamplingFlaw | None = None
    remark: str = ""  # of a completed call: the engine gave a finish reason that rolltap does not know
    delivered: bool | None = None  # None: not known (the process died before it recorded it)
    shape: CallShape = NO_SHAPE
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    masked: tuple[tuple[int, int], ...] = ()
    sampled_by: str = ""  # of a call of the session's origin: its rollout, or its session if that has none
    images: tuple[PromptImage, ...] = ()

    def __post_init__(self) -> None:
        sampled = len(self.output_ids)
        if self.images:
            _check_images(self.images, len(self.prompt_ids), f"call {self.id}")
        if self.flaw is None and len(self.logprobs) != sampled:
            raise AlignmentError(f"call {self.id}: {sampled} output ids but {len(self.logprobs)} log-probs")
        if self.versions:
            edges = [0, *(span.end for span in self.versions)]
            starts = [span.start for span in self.versions]
            if starts != edges[:-1] or edges[-1] != sampled:
                raise AlignmentError(f"call {self.id}: version spans {self.versions} do not tile {sampled} ids")
        if self.shared > len(self.prompt_ids):
            raise AlignmentError(f"call {self.id}: shares {self.shared} of {len(self.prompt_ids)} prompt ids")
        for name, array in self.extras.items():
            if len(array) != sampled and name != MASK_TABLE:
                raise AlignmentError(f"call {self.id}: extra {name!r} has {len(array)} rows for {sampled} ids")
        edges = [edge for span in self.masked for edge in span]
        if edges and (edges != sorted(set(edges)) or edges[0] < 0 or edges[-1] > sampled):
            raise AlignmentError(f"call {self.id}: masked spans {self.masked} do not lie in {sampled} ids")

    @property
    def context_length(self) -> int:
        """P + T: the number of tokens that a call must share to continue this one."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def unmasked(self) -> Bool:
        """Of each sampled token, [T]: whether no rule of the session masks it."""
        kept = np.ones(len(self.output_ids), np.bool_)
        for start, end in self.masked:
            kept[start:end] = False
        return kept

    @property
    def trainable(self) -> bool:
        """Whether the sampled tokens may carry loss, before any rule of the reconstructor."""
        return (
            self.outcome is Outcome.COMPLETED
            and self.flaw is None
            and self.delivered is not False
            and len(self.output_ids) > 0
        )


def _check_images(images: Sequence[PromptImage], length: int, where: str) -> None:
    edges = [edge for image in images for edge in (image.start, image.end)]
    if edges != sorted(edges) or edges[0] < 0 or edges[-1] > length or any(each.start == each.end for each in images):
        raise AlignmentError(f"{where}: its images do not lie in {length} ids, in order")


@dataclass(frozen=True, slots=True)
class CallSpan:
    """Where a call's sampled tokens lie in a segment: `[start, end)` of its token ids.

    `sampled_by`: the rollout that sampled a call of the session's origin (the session, if it has no rollout); "" for
    the session's own calls.
    """

    call_id: str
    start: int
    end: int
    trained: bool
    index: int  # 0-based position among the calls of its lineage
    agent: str = ""
    sampled_by: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The longest run of calls that extend each other token for token. All arrays are [L], except the table of masks.

    `loss_mask` is True where a token was sampled and is trained here; `logprobs` is 0.0 and `versions` is
    `NO_VERSION` elsewhere. `images` are those of all its tokens.
    """

    token_ids: Int32
    loss_mask: Bool
    logprobs: Float32
    versions: Int32
    turns: tuple[CallSpan, ...]
    agent: str = ""
    kind: CallKind = CallKind.MAIN
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    images: tuple[PromptImage, ...] = ()

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        if self.images:
            _check_images(self.images, length, "segment")
        named = {"loss_mask": self.loss_mask, "logprobs": self.logprobs, "versions": self.versions, **self.extras}
        for name, array in named.items():
            if len(array) != length and name != MASK_TABLE:
                raise AlignmentError(f"segment of {length} tokens: {name} has {len(array)} rows")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        trained = np.flatnonzero(self.loss_mask)
        return int(trained[0]) if len(trained) else len(self)


@dataclass(frozen=True, slots=True)
class Classification:
    """What a call was for, and whether its tokens carry loss; each with the rule that decided.

    `rule` is a `KindRule` of the reconstructor. `mask` is a `MaskReason`, or empty if the call carries loss.
    """

    call_id: str
    kind: CallKind
    rule: str
    agent: str
    mask: str = ""


class Grade(StrEnum):
    """How bad a finding is, the worst first."""

    FATAL = "fatal"  # can't be trained
    WARN = "warn"  # may teach the wrong thing
    INFO = "info"


@dataclass(frozen=True, slots=True)
class SessionFinding:
    """Something wrong or odd about a session, in `count` of its calls (`rolltap.reconstructor.findings`)."""

    name: str
    grade: Grade
    count: int
    text: str


class LogVerdict(StrEnum):
    """The outcome of a comparison."""

    MATCH = "match"
    MISMATCH = "mismatch"
    NONE = "none"  # nothing was compared


@dataclass(frozen=True, slots=True)
class LogCheck:
    """Whether a harness's own log of a session agrees with the record (`rolltap.reading.log_check`).

    `text` is a sentence: what differs (`mismatch`), why nothing was compared (`none`), or what agrees.
    """

    verdict: LogVerdict = LogVerdict.NONE
    text: str = "no log of the harness was read"


UNCHECKED = LogCheck()
"""The value until a log is compared."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The segments and breaks of a session: a pure function of its calls.

    `counts` holds what the report shows (calls, sampled, trained and masked tokens by rule, merges);
    `classifications` has one entry a call, in the order of their ids; `findings` come the worst first.
    """

    session_id: str
    segments: tuple[Segment, ...]
    breaks: tuple[Break, ...]
    counts: Mapping[str, int]
    classifications: tuple[Classification, ...] = ()
    findings: tuple[SessionFinding, ...] = ()
    log_check: LogCheck = UNCHECKED


@dataclass(frozen=True, slots=True)
class Task:
    """An instruction, an environment and an evaluator.

    `spec` holds what the runner needs (harness, runtime, evaluator, limits); the ledger does not read it.
    """

    id: str
    instruction: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()


UNPROTECTED = "unprotected"
"""Key of `Reward.detail`. Its value says why code that the agent wrote could have written the reward."""


@dataclass(frozen=True, slots=True)
class Reward:
    """An appended fact about a rollout.

    `scope` is `rollout`, `call:<id>`, `span:<call id>:<start>:<end>` or `role:<name>`; `source` is what the
    evaluator calls itself, `key_id` the key that appended it ("" where it is not known).
    """

    id: str
    rollout_id: str
    value: float
    scope: str = "rollout"
    source: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)
    created_at: float = 0.0
    key_id: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a forked session begins: after call `call_id` of session `session_id`.

    `at`: it begins inside the call's reply, after that many of its tokens; None: after the whole reply.
    """

    session_id: str
    call_id: str
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """The stream of calls made with one key. `key_hash` is SHA-256 of the key; the key itself is not kept.

    `origin`: where it was forked from another session, whose calls up to there are its context; None: it was not.
    """

    id: str
    policy: str
    key_hash: str
    created_at: float
    expires_at: float
    rollout_id: str | None = None
    closed_at: float | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    log_check: LogCheck = UNCHECKED
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class RolloutParent:
    """Where a forked rollout begins: after call `call_id` of rollout `rollout_id`. `at`: see `Origin`.

    `fork`: the id that the request gave which forked it (`ForkRollout`), if any.
    """

    rollout_id: str
    call_id: str
    at: int | None = None
    fork: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt: one harness run on one task. `parent`: the call of another rollout that it continues.

    `cause` is None unless it failed, timed out or was lost. `tampering` counts the agent's attempts to tamper, by
    `rolltap.tampering.TamperingKind`."""

    id: str
    group_id: str
    task_id: str
    index: int
    status: RolloutStatus = RolloutStatus.PENDING
    attempt: int = 0
    session_id: str | None = None
    scoring: Scoring = Scoring.SCORED
    reason: str = ""
    rewards: tuple[Reward, ...] = ()
    cause: Cause | None = None
    tampering: Mapping[str, int] = field(default_factory=dict)
    parent: RolloutParent | None = None

    @property
    def total_reward(self) -> float | None:
        """The sum of the rewards with scope "rollout"; None if there are none."""
        values = [reward.value for reward in self.rewards if reward.scope == "rollout"]
        return sum(values) if values else None

    @property
    def unprotected(self) -> str:
        """Why code that the agent wrote could have written its rewards; "" if it could not."""
        return next((str(each.detail[UNPROTECTED]) for each in self.rewards if UNPROTECTED in each.detail), "")


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task that are compared with each other.

    `policy` is the one that is trained. Where several play in a rollout, `roles` maps each role to its policy. Where
    several are trained, each has a group with the same rollouts: `trains` has the id of each one's, the first policy's
    first; it is empty where one is trained.
    """

    id: str
    task_id: str
    policy: str
    status: GroupStatus
    rollouts: tuple[Rollout, ...]
    created_at: float = 0.0
    failures: int = 0
    tags: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    trains: Mapping[str, str] = field(default_factory=dict)

    def reward_of(self, rollout: Rollout) -> float | None:
        """The rollout's reward in this group: the sum of the rewards with scope "rollout"; None if there are none.

        Where several policies are trained: the sum of those of this policy's roles, if there are any.
        """
        scopes = {f"role:{role}" for role, policy in self.roles.items() if policy == self.policy and self.trains}
        own = [reward.value for reward in rollout.rewards if reward.scope in scopes]
        return sum(own) if own else rollout.total_reward


def reward_scopes(roles: Mapping[str, str], trained: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """For each trained policy the scopes of its reward in a rollout: that of the rollout, and where several are
    trained, those of its roles (`Group.reward_of`)."""
    if len(trained) < 2:
        return (("rollout",),)
    own = {name: [f"role:{role}" for role, policy in roles.items() if policy == name] for name in trained}
    return tuple(("rollout", *own[name]) for name in trained)


def common_length(first: Int32, second: Int32) -> int:
    """How many leading ids of both are equal."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def call_order(trajectory: Trajectory) -> list[str]:
    """The ids of all calls that its segments and breaks name, each once.

    A call comes after the calls whose tokens its prompt contains and after the parent that its break names. Others,
    as those of parallel agents, are ordered by id, which is the proxy's clock: the clocks of two proxies may differ. If
    the parents form a cycle, the calls of the segments are ordered by id.
    """
    known: TopologicalSorter[str] = TopologicalSorter()
    called = {span.call_id for segment in trajectory.segments for span in segment.turns}
    for segment in trajectory.segments:
        before: list[str] = []
        for span in segment.turns:
            known.add(span.call_id, *before)
            before = [span.call_id]
    for broken in trajectory.breaks:
        known.add(broken.call_id, *([] if broken.parent_id is None else [broken.parent_id]))
    try:
        known.prepare()
    except CycleError:  # a foreign archive may name parents that come later
        return sorted(called)
    ready = list(known.get_ready())
    heapq.heapify(ready)
    ordered: list[str] = []
    while ready:
        ordered.append(heapq.heappop(ready))
        known.done(ordered[-1])
        for call_id in known.get_ready():
            heapq.heappush(ready, call_id)
    return ordered
