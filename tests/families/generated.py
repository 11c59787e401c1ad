"""Generated conversations of recorded harnesses: rules of the session, replies under a grammar, forks anywhere.

What is drawn: the messages and masks of the session's rules, the calls that have to call a tool or to write JSON, and
the calls after or inside which the session is forked, forks too. A fork's harness goes on as it was at that moment,
with other results of its tools.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import isinf
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np

from rolltap.calllog.facts import CallRow
from rolltap.contract.rules import MaskRule, MessageRule, SessionRules
from rolltap.engine.scripted import Prompt, ScriptedReply
from rolltap.harnesses.client import OpenedSession
from rolltap.proxy.call.sources.tokens import TokenSource
from rolltap.proxy.continuation.plan import Continuation
from rolltap.types import Origin, Outcome, Trajectory

from ..schemas import schema
from .cells import ALLOWED_BREAKS, FamilyCell, FamilyHouse, proof_failures
from .playing import Refused, post
from .proof import SessionProof, prove
from .recorded import RECORDED, JsonObject, RecordedCall, RecordedHarness, RecordedRequest
from .script import SECOND_TASK, TASK, SessionScript
from .writing import FamilyReplyWriter

KINDS = ("injected", "constrained", "forked", "forked inside", "injected, constrained, forked, forked inside")
THIRD_TASK = "PARTTHREE: once more, please."
MOST_CALLS, FORKS = 16, 3
CANT = ("can't be made to call", "always thinks first")
"""What is said of a family that can't do what a request demands: the request is then sent without."""

NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")

Demand = Literal["named", "required", "schema"]


@dataclass
class Moment:
    """A conversation between two calls: its harness, what the model will say, and the user's next prompts.

    With `is_asked` the next request is ready; else `calls` are to be answered, or the next prompt is to be said.
    `number` counts the calls so far, `made` the tool calls.
    """

    harness: RecordedHarness
    script: SessionScript
    prompts: list[str]
    calls: list[RecordedCall] = field(default_factory=list)
    is_asked: bool = False
    number: int = 0
    made: int = 0

    def go_on(self, rng: random.Random, label: str) -> bool:
        """Answers the calls or says the next prompt; False if there is none."""
        harness, calls, self.calls = self.harness, self.calls, []
        if calls and harness.finish not in (call.arguments for call in calls):
            harness.answer(calls, [(f"line {self.number}{label}", rng.random() < 0.2) for _ in calls])
        elif self.prompts:
            harness.ask(self.prompts.pop(0) + label)
        else:
            return False
        if harness.notifies and rng.random() < 0.3:
            harness.notify(f"Notice {self.number}{label}.")
        self.is_asked = True
        return True


@dataclass(frozen=True)
class Turn:
    """A call: the moments before and after it, its request, and what the harness read of the reply."""

    before: Moment
    after: Moment
    request: RecordedRequest
    demand: Demand | None
    said: Any


@dataclass
class Branch:
    """A session: the first one, or a fork. `earlier` are the sessions from which it comes, the nearest last."""

    session: OpenedSession
    turns: list[Turn]
    rows: Sequence[CallRow]
    trajectory: Trajectory
    origin: Origin | None = None
    again: Turn | None = None
    earlier: tuple[Branch, ...] = ()

    @property
    def id(self) -> str:
        return self.session.session_id


@dataclass
class BranchModel:
    """What the model says in a session: its script, but for what is left of a reply that a fork goes on with (`rest`),
    and for a call that its prompt begins (`beginning`)."""

    writer: FamilyReplyWriter
    script: SessionScript
    rest: Sequence[int] | None = None
    beginning: tuple[int, ...] = ()

    def next(self, prompt: Prompt) -> ScriptedReply:
        rest, self.rest = self.rest, None
        said = self._demanded(prompt.ids) if self.beginning else self.script.next(prompt)
        return said if rest is None else ScriptedReply(ids=tuple(rest))

    def _demanded(self, prompt: list[int]) -> ScriptedReply:
        """What the model samples behind the beginning of a call of the shell."""
        size = len(self.beginning)
        called = ScriptedReply(call=(self.script.run("echo demanded"),))
        reply = self.writer.write(called, prompt[: len(prompt) - size])
        places = (at + size for at in range(4) if tuple(reply[at : at + size]) == self.beginning)
        place = next(places, None) or reply.index(self.beginning[-1]) + 1  # a model's own call may have another id
        return ScriptedReply(ids=tuple(reply[place:]))


class Generated:
    """One conversation of a kind on a family, with its forks."""

    def __init__(self, house: FamilyHouse, kind: str, seed: int) -> None:
        self.house, self.kind = house, kind
        self.rng = random.Random(f"{house.family.name} {kind} {seed}")
        self.harness = self.rng.choice(list(RECORDED))
        self.thinking = self.rng.random() < 0.6
        self.rules = self._rules() if "injected" in kind else SessionRules()
        self.branches: list[Branch] = []
        self.failures: list[str] = []

    def _rules(self) -> SessionRules:
        rng = self.rng
        messages = [
            MessageRule(
                text=f"HINT{number}: the answer is in file{rng.randrange(100)}.txt",
                message_role=rng.choice(["user", "system"]),
                call=rng.randrange(1, 5),
                every=rng.choice([None, 2]),
            )
            for number in range(rng.randrange(1, 4))
        ]
        masks: list[JsonObject] = [
            {"pattern": rng.choice(["(?i)there", "[a-m]+ ", "two"])},
            {"tokens": (1, 3), "call": 2},
            {"characters": (3, 9)},
        ]
        return SessionRules(tuple(messages), tuple(MaskRule(**each) for each in masks if rng.random() < 0.4))

    async def play(self) -> None:
        kind, client = RECORDED[self.harness], self.house.home.client
        session = await client.open_session(policy=self.house.name_of(thinking=self.thinking), rules=self.rules)
        finish = kind.finish if self.house.family.tools else ""
        script = SessionScript(self.house.family, kind.use, finish)
        await self._branch(session, Moment(kind(session.endpoint.model), script, [TASK, SECOND_TASK]))
        for number in range(FORKS if "forked" in self.kind else 0):
            await self._fork(self.rng.choice(self.branches), number)
        if self.kind == "constrained":
            await self._replay(self.branches[0])

    async def _replay(self, branch: Branch) -> None:
        """The record answers the same requests with the same tokens and what grammars left of them."""
        session = await self.house.home.client.open_replay(branch.id, ttl=600)
        ids: dict[str, str] = {}  # the harness sends the ids that it gets now
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.endpoint.key}"}) as http:
            for turn in branch.turns:
                body = json.dumps(turn.request.body)
                for before, now in ids.items():
                    body = body.replace(before, now)
                events = await post(http, session.endpoint, RecordedRequest(turn.request.path, json.loads(body)))
                calls = deepcopy(turn.before.harness).take(events).calls
                ids |= {old.id: new.id for old, new in zip(turn.after.calls, calls, strict=True) if old.id}
        rows = await self.house.home.app.services.call_log.rows(session.session_id)
        for before, after in zip(branch.rows, rows, strict=True):
            assert before.completion is not None
            assert after.completion is not None
            extras = [
                {name: array.tolist() for name, array in done.extras.items()}
                for done in (before.completion, after.completion)
            ]
            same = before.completion.output_ids.tolist() == after.completion.output_ids.tolist()
            if not same or extras[0] != extras[1]:
                self.failures.append(f"a replay of call {before.intent.id} has other tokens")
        if self.house.asked(session.session_id):
            self.failures.append("a replay asks the engine")

    async def _fork(self, branch: Branch, number: int) -> None:
        """A fork of `branch` at one of its calls."""
        rng, at = self.rng, None
        inside = self.kind == "forked inside" or ("inside" in self.kind and rng.random() < 0.5)
        place = rng.randrange(len(branch.rows))
        turn, row = branch.turns[place], branch.rows[place]
        assert row.completion is not None
        ids = row.completion.output_ids.tolist()
        if inside:
            at = rng.randrange(len(ids))
        session = await self.house.home.client.fork_session(branch.id, row.intent.id, at=at)
        moment = deepcopy(turn.before if inside else turn.after)
        if not inside and not moment.calls and not moment.prompts:
            moment.prompts.append(THIRD_TASK)
        rest = self._writer.respelled(ids[at:]) if inside and not row.intent.shape.constrained else None
        origin = Origin(branch.id, row.intent.id, at)
        earlier = (*branch.earlier, branch)
        again = turn if inside else None
        await self._branch(session, moment, f" ({number})", rest, again=again, origin=origin, earlier=earlier)

    async def _branch(
        self, session: OpenedSession, moment: Moment, label: str = "", rest: Sequence[int] | None = None, **more: Any
    ) -> None:
        """Plays a session to its end. `rest` is what the model says of the reply that the first call goes on with."""
        home, model = self.house.home, BranchModel(self._writer, moment.script, rest)
        self.house.model.put(session.session_id, model)
        turns = await self._converse(session, moment, model, label, more.get("again"))
        await home.client.close_session(session.session_id)
        rows = [
            row
            for row in await home.app.services.call_log.rows(session.session_id)
            if row.completion is None or row.completion.outcome is not Outcome.REFUSED
        ]
        trajectory = await home.reader.trajectory(session.session_id)
        assert len(turns) == len(rows)
        self.branches.append(Branch(session, turns, rows, trajectory, **more))

    async def _converse(
        self, session: OpenedSession, moment: Moment, model: BranchModel, label: str, again: Turn | None
    ) -> list[Turn]:
        turns: list[Turn] = []
        endpoint = session.endpoint
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as http:
            while len(turns) < MOST_CALLS and (moment.is_asked or moment.go_on(self.rng, label)):
                before, demand = deepcopy(moment), again.demand if again is not None else self._drawn_demand()
                request = again.request if again is not None else deepcopy(moment.harness.request())
                if demand is not None and again is None:
                    request = _demanding(request, demand, moment.harness.shell, schema(self.rng))
                model.beginning = self._beginning(moment) if demand == "named" else ()
                try:
                    events = await post(http, endpoint, request)
                except Refused as error:
                    if demand is None or not any(words in str(error) for words in CANT):
                        raise
                    model.beginning = ()
                    request, demand = deepcopy(moment.harness.request()), None
                    events = await post(http, endpoint, request)
                reply = moment.harness.take(events)
                moment.calls, moment.is_asked = reply.calls, False
                moment.number, moment.made = moment.number + 1, moment.made + len(reply.calls)
                said = reply.text, [(call.name, msgspec.json.decode(call.arguments)) for call in reply.calls]
                turns.append(Turn(before, deepcopy(moment), request, demand, said))
                again = None
        return turns

    def _drawn_demand(self) -> Demand | None:
        if "constrained" not in self.kind or self.rng.random() < 0.5:
            return None
        demands: tuple[Demand, ...] = ("named", "required", "schema")
        return self.rng.choice(demands)

    def _beginning(self, moment: Moment) -> tuple[int, ...]:
        """How the prompt begins a call of the shell, where the family's calls have no grammar."""
        return self._continuation.call_beginnings.find(moment.harness.shell, moment.made)

    @property
    def _continuation(self) -> Continuation:
        source = self.house.home.app.policies[self.house.name_of(thinking=self.thinking)].source
        assert isinstance(source, TokenSource)
        return source.continuation

    @property
    def _allowed_breaks(self) -> frozenset[str]:
        """A demanded call without a grammar does not think: where the system text has the effort, it is another one."""
        is_told = "constrained" in self.kind and self._continuation.renderer.efforts.levels
        return ALLOWED_BREAKS | ({"system_changed", "history_edited"} if is_told else frozenset())

    @property
    def _writer(self) -> FamilyReplyWriter:
        writer = self.house.engine.model.writer
        assert isinstance(writer, FamilyReplyWriter)
        return writer

    def judged(self) -> tuple[SessionProof, list[str]]:
        """What the conversation came to, all its sessions together, and what is wrong."""
        proofs, allowed = [self._proof(branch) for branch in self.branches], self._allowed_breaks
        failures = [
            f"{self.harness}, session {branch.id}: {failure}"
            for branch, proof in zip(self.branches, proofs, strict=True)
            for failure in (*proof_failures(proof, allowed), *self._hint_failures(branch), *_fork_failures(branch))
        ]
        return _sum(proofs), [*self.failures, *failures, *self._twice()]

    def _proof(self, branch: Branch) -> SessionProof:
        sessions = (*branch.earlier, branch)
        journal = [entry for one in sessions for entry in self.house.asked(one.id)]
        before = [row for one in branch.earlier for row in one.rows]
        decode = self._writer.tokenizer.decode
        proof = prove(branch.rows, branch.trajectory, journal, decode, origin=branch.origin, before=before)
        refused = sum(map(self._is_beyond_floats, branch.rows))
        flaws = Counter(proof.flaws) - Counter({"tool_call_unparsable": refused})
        return replace(proof, flaws=dict(flaws), masked_calls=proof.masked_calls + refused)

    def _is_beyond_floats(self, row: CallRow) -> bool:
        """Whether a grammar has let a number through that no float holds: no client could send such a call back."""
        done = row.completion
        if done is None or done.flaw is None or not row.intent.shape.constrained:
            return False
        numbers = NUMBER.findall(self._writer.tokenizer.decode(done.output_ids.tolist()))
        return any(isinf(float(number)) for number in numbers)

    def _twice(self) -> Iterator[str]:
        """Over all sessions each sampled token that no rule masks is trained once."""
        trained = Counter(
            (turn.call_id, offset)
            for branch in self.branches
            for segment in branch.trajectory.segments
            for turn in segment.turns
            for offset in np.flatnonzero(segment.loss_mask[turn.start : turn.end]).tolist()
        )
        if again := [token for token, times in trained.items() if times > 1]:
            yield f"{len(again)} tokens are trained more than once, as of call {again[0][0]}"
        for branch in self.branches:
            for row in branch.rows:
                assert row.completion is not None
                if self._is_beyond_floats(row):
                    continue
                masked = sum(end - start for start, end in row.completion.masked)
                own = sum(call == row.intent.id for call, _ in trained)
                if own != len(row.completion.output_ids) - masked:
                    yield f"of call {row.intent.id} {own} tokens are trained, not all but {masked}"

    def _hint_failures(self, branch: Branch) -> Iterator[str]:
        """Every prompt has each message of the rules as often as it was due up to there, the harness never."""
        decode = self._writer.tokenizer.decode
        for turn, row in zip(branch.turns, branch.rows, strict=True):
            prompt, number = decode(row.prompt_ids.tolist()), turn.before.number + 1
            for rule in self.rules.messages:
                due = sum(rule.is_for(each) for each in range(1, number + 1))
                if prompt.count(rule.text) != due:
                    yield f"call {number} has {rule.text!r} {prompt.count(rule.text)} times, not {due}"
                if rule.text in str(turn.after.harness.items):
                    yield f"the harness has got {rule.text!r}"


def _fork_failures(branch: Branch) -> Iterator[str]:
    """The first call of a fork begins with the tokens of its origin; inside a reply its client gets the whole reply."""
    if branch.origin is None or not branch.rows:
        return
    first, origin = branch.rows[0], branch.origin
    parent = next(row for row in branch.earlier[-1].rows if row.intent.id == origin.call_id)
    assert parent.completion is not None
    context = [*parent.prompt_ids.tolist(), *parent.completion.output_ids[: origin.at].tolist()]
    if first.intent.break_ is None and first.prompt_ids[: len(context)].tolist() != context:
        yield "a fork does not begin with its origin's tokens"
    if branch.again is not None:
        if first.prompt_ids.tolist() != context:
            yield f"a fork inside a reply has another prompt, with the break {first.intent.break_}"
        if not first.intent.shape.constrained and branch.turns[0].said != branch.again.said:
            yield f"a fork inside a reply says {branch.turns[0].said}, not {branch.again.said}"


def _sum(proofs: Sequence[SessionProof]) -> SessionProof:
    """The proofs of several sessions as one."""
    whole = proofs[0]
    for proof in proofs[1:]:
        numbers = {
            name: getattr(whole, name) + getattr(proof, name)
            for name in ("calls", "main", "continuing", "bridged", "trained_calls", "trained_tokens", "masked_calls",
                         "violations", "errors", "handles")
        }  # fmt: skip
        counts = {
            name: dict(Counter(getattr(whole, name)) + Counter(getattr(proof, name))) for name in ("breaks", "flaws")
        }
        whole = replace(whole, **numbers, **counts)
    return whole


def _demanding(request: RecordedRequest, demand: Demand, shell: str, form: JsonObject) -> RecordedRequest:
    """The request with a demand: a call of `shell`, of any tool, or JSON of the schema `form`."""
    body = request.body
    if "/chat/" in request.path:
        named: JsonObject = {"type": "function", "function": {"name": shell}}
        more = {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": form}}}
    elif "/responses" in request.path:
        named = {"type": "function", "name": shell}
        more = {"text": {"format": {"type": "json_schema", "name": "r", "schema": form}}}
    elif "/messages" in request.path:
        named = {"type": "tool", "name": shell}
        more = {"output_config": {"format": {"type": "json_schema", "schema": form}}}
    else:
        config = {"mode": "ANY", **({"allowedFunctionNames": [shell]} if demand == "named" else {})}
        json_config = {"responseMimeType": "application/json", "responseJsonSchema": form}
        config_body = {"generationConfig": {**body["generationConfig"], **json_config}}
        more = config_body if demand == "schema" else {"toolConfig": {"functionCallingConfig": config}}
        return RecordedRequest(request.path, {**body, **more})
    if demand != "schema":
        any_tool: Any = {"type": "any"} if "/messages" in request.path else "required"
        more = {"tool_choice": named if demand == "named" else any_tool}
    return RecordedRequest(request.path, {**body, **more})


async def generated_cell(house: FamilyHouse, kind: str, seeds: int) -> FamilyCell:
    """Plays so many conversations of a kind and says what they came to."""
    began, family = time.monotonic(), house.family
    proofs: list[SessionProof] = []
    failures: list[str] = []
    for seed in range(seeds):
        conversation = Generated(house, kind, seed)
        await conversation.play()
        proof, problems = conversation.judged()
        proofs.append(proof)
        failures += problems
    seconds = round(time.monotonic() - began, 1)
    return FamilyCell(
        kind, family.name, family.by, proof=_sum(proofs), failures=tuple(failures), seconds=seconds, generated=True
    )
