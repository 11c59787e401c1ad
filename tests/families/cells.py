"""Cells of the matrix harness x family: how one is run, and what is said of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rolltap.engine.scripted import ScriptedEngine, ToolUse

from ..harnesses.house import POLICY, House, opened
from .families import Family
from .playing import play
from .proof import SessionProof, prove
from .recorded import RECORDED, SUMMARIZE
from .script import FAILING, FIRST, LISTING, SECOND, FamilyModel
from .vocabularies import model_folder
from .writing import FamilyReplyWriter

NO_THINKING = "no-thinking"
"""The policy of the same model that is pinned not to think."""


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
        return prove(rows, trajectory, journal)


@asynccontextmanager
async def family_house(family: Family, folder: Path, vocabulary: str = "") -> AsyncIterator[FamilyHouse]:
    """The proxy, with its data in `folder`. `vocabulary` is as in `model_folder`."""
    weights = model_folder(family, vocabulary)
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
    house.model.add(
        session.session_id,
        lambda command: ToolUse(tool=kind.shell, arguments={kind.argument: command}),
        finish=kind.finish if family.tools else "",
        summary=SUMMARIZE if compacts else "",
    )
    played = await play(kind(session.endpoint.model), session.endpoint, compacts=compacts)
    proof = await house.proof(session.session_id)
    expected = () if not family.tools else (FIRST, SECOND, FAILING, *([kind.finish] if kind.finish else [LISTING]))
    failures = [*([f"a call was refused: {played.refusal}"] if played.refusal else []), *proof_failures(proof)]
    if not failures and played.ran != expected:
        failures.append(f"the model called {expected}, the harness ran {played.ran}")
    if not failures and proof.bridged < proof.continuing - sum(proof.breaks.values()):
        failures.append(f"{proof.bridged} of {proof.continuing} prompts are bridged, breaks {proof.breaks}")
    return FamilyCell(
        name, family.name, family.by, thinking=thinking, compacts=compacts, ran=bool(played.ran), proof=proof,
        failures=tuple(failures),
    )  # fmt: skip


def proof_failures(proof: SessionProof) -> Sequence[str]:
    """What a proof says against a session: violations, failed calls, and sampled tokens that are not trained."""
    out = [*proof.violations, *(f"a call failed: {error}" for error in proof.errors)]
    if proof.flaws:
        out.append(f"flaws {proof.flaws}")
    if proof.trained_calls < proof.main:
        out.append(f"{proof.trained_calls} of {proof.main} main calls are trained")
    return out
