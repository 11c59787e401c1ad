"""Recorded rollouts for the readers of datasets that have environments of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolltap.engine.tiny import tokenizer as tiny
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import Container, ExportItem, SkippedItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query
from rolltap.reconstructor.exporters.writers import FILES
from rolltap.types import Finish

from ..unit.exporters.world import World, says, system, tool, user


def world_in(folder: Path, template: str = "") -> World:
    """A small tokenizer, with Qwen3's chat template or another one."""
    folder.mkdir(parents=True)
    tiny.save(tiny.train(tiny.corpus("")), folder)
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return World(folder)


def conversation(world: World, name: str, *, think: bool, cut: bool = False) -> ExportItem:
    """A tool's call with words beside it, its result, an answer; with `cut`, an answer that hit the limit as well."""
    script, thought = world.script(name), (lambda text: text) if think else (lambda text: "")
    first = says("I look.", ("c1", "bash", {"command": f"ls {name}"}), reasoning=thought("what is there?"))
    history = [system("You are an agent."), user("Make the file.")]
    parent = script.ask(history, first)
    history = [*history, first, tool("c1", "a.txt")]
    second = says(f"The file of {name} is there.", reasoning=thought("it is done"))
    parent = script.ask(history, second, parent=parent, **({"finish": Finish.LENGTH} if cut else {}))
    if cut:
        script.ask([*history, second, user("Go on.")], says("It is.", reasoning=thought("sure")), parent=parent)
    return script.item(reward=1.0, task=name)


def exported(
    out: Path, format: str, items: Sequence[ExportItem], container: Container | None = None, **options: str
) -> dict[str, Any]:
    """The dataset's manifest."""
    with DatasetWriter(out, exporter_named(format, options), Query(container=container)) as writer:
        for item in items:
            writer.add([item])
        return writer.finish()


def written(
    out: Path, format: str, groups: Sequence[Sequence[ExportItem]], container: Container = "jsonl", **options: str
) -> tuple[Path, list[str]]:
    """The file of a format's rows, as a data set holds it, and why rollouts were skipped. It asks for no installed
    rolltap, which a data set's manifest names the version of."""
    exporter = exporter_named(format, options)
    path = out.with_suffix(f".{container}")
    file, reasons = FILES[container](path, exporter.schema()), []
    for group in groups:
        for row in exporter.rows(group):
            if isinstance(row, SkippedItem):
                reasons.append(row.reason)
            else:
                file.write(row.values)
    file.close()
    return path, reasons


def sampled(items: Sequence[ExportItem]) -> list[list[int]]:
    """The tokens of every call that is trained, sorted."""
    trained = {turn.call_id for item in items for row in item.rows for turn in row.turns if turn.trained}
    return sorted(call.output_ids.tolist() for item in items for call in item.calls.values() if call.id in trained)


def runs(ids: Sequence[int], on: Sequence[Any]) -> list[list[int]]:
    """The stretches of ids that are on, in order."""
    found: list[list[int]] = []
    before: Any = False
    for token, now in zip(ids, on, strict=True):
        if now and not before:
            found.append([])
        if now:
            found[-1].append(token)
        before = now
    return found
