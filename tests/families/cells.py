"""Cells of the matrix harness x family: how one is run, and what is said of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rolltap.engine.scripted import Entry, ScriptedEngine
from rolltap.harnesses.client import OpenedSession
from rolltap.proxy.engines.registry import ENGINES
from rolltap.settings import load_settings

from ..harnesses.house import POLICY, House, served
from .families import HARMONY, Family
from .grammar_engine import GrammarEngine
from .playing import play
from .proof import SessionProof, prove
from .recorded import RECORDED, SUMMARIZE
from .script import FAILING, FIRST, GOODBYE, LISTING, SECOND, FamilyModel
from .vocabularies import model_folder
from .writing import FamilyReplyWriter

NO_THINKING = "-no-thinking"
"""Stands behind the name of the policy that is pinned not to think."""

ALLOWED_BREAKS = frozenset({"thinking_dropped", "template_not_bridgeable", "compaction"})
"""A template may drop old thinking, or render new messages by what stood before them; a summary replaces a history."""


@dataclass
class FamilyHouse:
    """A proxy that serves one family's model as a policy, and as another one that is pinned not to think; the scripted
    engine behind it, and what that says."""

    family: Family
    home: House
    engine: ScriptedEngine
    model: FamilyModel
    policy: str

    def name_of(self, *, thinking: bool) -> str:
        """The policy that may think, or the one that is pinned not to."""
        return self.policy if thinking else self.policy + NO_THINKING

    async def open(self, *, thinking: bool) -> OpenedSession:
        return await self.home.open(self.name_of(thinking=thinking))

    async def proof(self, session_id: str) -> SessionProof:
        """Of a session that has ended."""
        await self.home.client.close_session(session_id)
        rows = await self.home.app.services.call_log.rows(session_id)
        trajectory = await self.home.reader.trajectory(session_id)
        return prove(rows, trajectory, self.asked(session_id), self.engine.model.writer.tokenizer.decode)

    def asked(self, session_id: str) -> list[Entry]:
        """What the engine was asked in a session."""
        return [entry for entry in self.engine.journal.entries if entry.session == session_id]

    def last_prompt(self, session_id: str) -> str:
        """The text of the last prompt that the engine saw of a session."""
        return self.engine.model.writer.tokenizer.decode(self.asked(session_id)[-1].prompt_ids)


@asynccontextmanager
async def family_houses(
    families: Mapping[str, Family], folder: Path, vocabulary: str = ""
) -> AsyncIterator[dict[str, FamilyHouse]]:
    """One proxy for families by the names of their policies, with its data in `folder`.

    `vocabulary` is as in `model_folder`. The name of the policy is what harnesses are told as the model's.
    """
    engines: dict[str, ScriptedEngine] = {}
    models = {name: FamilyModel(family) for name, family in families.items()}
    policies: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        for name, family in families.items():
            weights = model_folder(family, "" if family.markup is HARMONY and family.renderer else vocabulary)
            engine = ScriptedEngine(models[name], weights, family=FamilyReplyWriter(family, weights))
            engines[name] = await stack.enter_async_context(engine)
            policy = {"engine": name, "model": "scripted", "tokenizer": str(weights), "family": family.renderer}
            policies |= {name: policy, name + NO_THINKING: {**policy, "pin": {"thinking": False}}}
        kinds = {f"grammar-{name}": partial(GrammarEngine, engine) for name, engine in engines.items()}
        stack.enter_context(patch.dict(ENGINES, kinds))  # as a package of one's own would register them
        urls = {name: {"url": engine.url, "kind": f"grammar-{name}"} for name, engine in engines.items()}
        settings = load_settings(None, data=folder / "data", engines=urls, policies=policies)
        home = await stack.enter_async_context(served(next(iter(engines.values())), settings))
        yield {name: FamilyHouse(family, home, engines[name], models[name], name) for name, family in families.items()}


@asynccontextmanager
async def family_house(family: Family, folder: Path, vocabulary: str = "") -> AsyncIterator[FamilyHouse]:
    """The proxy for one family, under a name that no harness knows."""
    async with family_houses({POLICY: family}, folder, vocabulary) as houses:
        yield houses[POLICY]


@dataclass(frozen=True)
class FamilyCell:
    """One harness on one family. `ran` says whether the model's calls were run as such; else they were text.

    `failures` are sentences; a cell without any is as it should be. `release` is empty for a recorded shape. Of
    `generated` conversations `harness` is their kind.
    """

    harness: str
    family: str
    by: str
    release: str = ""
    dialect: str = ""
    thinking: bool = True
    compacts: bool = False
    ran: bool = False
    proof: SessionProof | None = None
    failures: tuple[str, ...] = ()
    seconds: float = 0.0
    generated: bool = False

    @property
    def name(self) -> str:
        marks = ["" if self.thinking else "no thinking", "compaction" if self.compacts else ""]
        return ", ".join([f"{self.harness} on {self.family}", *filter(None, marks)])


async def recorded_cell(house: FamilyHouse, name: str, *, thinking: bool = True, compacts: bool = False) -> FamilyCell:
    """The cell of a recorded shape."""
    kind, family = RECORDED[name], house.family
    session = await house.open(thinking=thinking)
    finish = kind.finish if family.tools else ""
    house.model.add(session.session_id, kind.use, finish=finish, summary=SUMMARIZE if compacts else "")
    began = time.monotonic()
    played = await play(kind(session.endpoint.model), session.endpoint, compacts=compacts)
    proof = await house.proof(session.session_id)
    cell = FamilyCell(
        name, family.name, family.by, thinking=thinking, compacts=compacts, ran=bool(played.ran), proof=proof,
        seconds=round(time.monotonic() - began, 1),
    )  # fmt: skip
    if played.refusal:
        return replace(cell, failures=(f"a call was refused: {played.refusal}", *proof.violations))
    failures = list(proof_failures(proof))
    calls = (FIRST, SECOND, FAILING, finish or LISTING) if family.tools and family.reads else ()
    if played.ran != calls:
        failures.append(f"the harness ran {played.ran}, not {calls}")
    if GOODBYE not in played.answer and family.reads and not kind.finish:
        failures.append(f"the last reply says {played.answer!r}")
    prompt = house.last_prompt(session.session_id)
    failures += [
        f"the last prompt holds {text!r} {prompt.count(text)} times" for text in played.texts if prompt.count(text) != 1
    ]
    return replace(cell, failures=tuple(failures))


def proof_failures(proof: SessionProof, allowed: frozenset[str] = ALLOWED_BREAKS) -> Iterator[str]:
    """What a proof says against a session: violations, failed calls, prompts that should have been bridged.

    `allowed` are the reasons of breaks that this harness and this family may have.
    """
    yield from proof.violations
    yield from (f"a call failed: {error}" for error in proof.errors)
    if proof.flaws:
        yield f"flaws {proof.flaws}"
    if proof.trained_calls + proof.masked_calls < proof.main:
        yield f"{proof.trained_calls} of {proof.main} main calls are trained"
    if unexpected := proof.breaks.keys() - allowed:
        yield f"breaks by {', '.join(sorted(unexpected))}"
    if proof.bridged < proof.continuing - sum(proof.breaks.values()):
        yield f"{proof.bridged} of {proof.continuing} prompts are bridged, with breaks {proof.breaks}"
    if proof.handles:
        yield f"a prompt holds our own id {proof.handles[0]}"
