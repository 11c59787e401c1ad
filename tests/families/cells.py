"""Cells of the matrix harness x family: how one is run, and what is said of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rolltap.engine.scripted import ScriptedEngine

from ..harnesses.house import POLICY, House, opened
from .families import HARMONY, Family
from .playing import play
from .proof import SessionProof, prove
from .recorded import RECORDED, SUMMARIZE
from .script import FAILING, FIRST, GOODBYE, LISTING, SECOND, FamilyModel
from .vocabularies import model_folder
from .writing import FamilyReplyWriter

NO_THINKING = "no-thinking"
"""The policy of the same model that is pinned not to think."""

ALLOWED_BREAKS = frozenset({"thinking_dropped", "template_not_bridgeable", "compaction"})
"""A template may drop old thinking, or render new messages by what stood before them; a summary replaces a history."""


@dataclass
class FamilyHouse:
    """A proxy with one family's model, and the scripted model behind it."""

    family: Family
    home: House
    model: FamilyModel

    async def proof(self, session_id: str) -> SessionProof:
        """Of a session that has ended."""
        await self.home.client.close_session(session_id)
        rows = await self.home.app.services.call_log.rows(session_id)
        trajectory = await self.home.reader.trajectory(session_id)
        journal = [entry for entry in self.home.engine.journal.entries if entry.session == session_id]
        return prove(rows, trajectory, journal, self.home.engine.model.writer.tokenizer.decode)

    def last_prompt(self, session_id: str) -> str:
        """The text of the last prompt that the engine saw of a session."""
        ids = next(
            entry.prompt_ids for entry in reversed(self.home.engine.journal.entries) if entry.session == session_id
        )
        return self.home.engine.model.writer.tokenizer.decode(ids)


@asynccontextmanager
async def family_house(family: Family, folder: Path, vocabulary: str = "") -> AsyncIterator[FamilyHouse]:
    """The proxy, with its data in `folder`. `vocabulary` is as in `model_folder`."""
    weights = model_folder(family, "" if family.markup is HARMONY and family.renderer else vocabulary)
    model = FamilyModel(family)
    engine = ScriptedEngine(model, weights, family=FamilyReplyWriter(family, weights))
    variants = {NO_THINKING: {"pin": {"thinking": False}}}
    async with (
        engine,
        opened(engine, folder, variants=variants, tokenizer=str(weights), family=family.renderer) as home,
    ):
        yield FamilyHouse(family, home, model)


@dataclass(frozen=True)
class FamilyCell:
    """One harness on one family. `ran` says whether the model's calls were run as such; else they were text.

    `failures` are sentences; a cell without any is as it should be. `release` is empty for a recorded shape.
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

    @property
    def name(self) -> str:
        marks = ["" if self.thinking else "no thinking", "compaction" if self.compacts else ""]
        return ", ".join([f"{self.harness} on {self.family}", *filter(None, marks)])


async def recorded_cell(house: FamilyHouse, name: str, *, thinking: bool = True, compacts: bool = False) -> FamilyCell:
    """The cell of a recorded shape."""
    kind, family = RECORDED[name], house.family
    session = await house.home.open(POLICY if thinking else NO_THINKING)
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
    if proof.trained_calls < proof.main:
        yield f"{proof.trained_calls} of {proof.main} main calls are trained"
    if unexpected := proof.breaks.keys() - allowed:
        yield f"breaks by {', '.join(sorted(unexpected))}"
    if proof.bridged < proof.continuing - sum(proof.breaks.values()):
        yield f"{proof.bridged} of {proof.continuing} prompts are bridged, with breaks {proof.breaks}"
    if proof.handles:
        yield f"a prompt holds our own id {proof.handles[0]}"
