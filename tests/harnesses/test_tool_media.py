"""A harness whose model reads a picture and a document goes on: a text-only model gets a line in their place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rolltap.engine.scripted import Script, ScriptedReply, ToolUse
from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.agents.install import Installation
from rolltap.harnesses.agents.registry import get_harness
from rolltap.harnesses.base import Ending
from rolltap.tokenizer import HubTokenizer

from .house import house
from .matrix import Cell
from .scenarios import TOOLS, Scenario, Tools, main_rule
from .test_matrix import through

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PDF = (
    "%PDF-1.1\\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\\n2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\\n"
    "3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>endobj\\ntrailer<</Root 1 0 R>>\\n%%EOF\\n"
)
MAKE = f"echo {PNG} | base64 -d > a.png; printf '%b' '{PDF}' > a.pdf"

READERS: dict[tuple[str, str], tuple[str, str, bool]] = {
    ("claude-code", "anthropic"): ("Read", "file_path", True),
    ("codex", "openai_responses"): ("view_image", "path", False),
    ("gemini-cli", "gemini"): ("read_file", "file_path", True),
}
"""The tool that reads a file, its argument, and whether it reads documents, by harness and protocol.

Pi, OpenCode and Qwen Code are told that the model takes no images, and write words of their own.
"""

LINE = {
    "a.png": "[image, not shown to this model]",
    "a.pdf": "[document (application/pdf), not shown to this model]",
}


@pytest.mark.harness
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "dialect"), READERS)
async def test_reading_a_picture_does_not_end_the_run(
    name: str,
    dialect: str,
    release: Callable[[str], Installation],
    note_cell: Callable[[Cell], None],
    tmp_path: Path,
) -> None:
    harness, tools = get_harness(name, dialect=dialect), TOOLS[name]
    tool, argument, reads_documents = READERS[name, dialect]

    files = ["a.png", *(["a.pdf"] if reads_documents else [])]

    def read(file: str) -> ScriptedReply:
        return ScriptedReply(say=f"I read {file}.", call=(ToolUse(tool, {argument: f"/workspace/{file}"}),))

    def script(tools: Tools) -> Script:
        make = ScriptedReply(say="I make them.", call=(tools.run(MAKE),))
        write = ScriptedReply(call=(tools.run("echo hi > out.txt"),))
        rule = main_rule(make, *map(read, files), write, tools.end("Done."))
        return Script(rules=(rule,), otherwise=ScriptedReply(say="Fine."))

    scenario = Scenario("media", script, 3 + len(files), makes={"out.txt": "hi\n"})
    async with house(script(tools), tmp_path, max_context=200_000) as home:
        run = await through(home, harness, release(name), scenario)
    note_cell(Cell.of(harness, "media", run))
    (exit_,) = run.exits
    assert exit_.ending is Ending.DONE, exit_.output
    assert run.files == scenario.makes, exit_.output
    assert all(call["outcome"] == "completed" for call in run.calls), exit_.output
    last = HubTokenizer(FOLDER).decode(run.asked[-1].prompt_ids)
    assert LINE["a.png"] in last, last[-3000:]
    assert (LINE["a.pdf"] in last) == reads_documents, last[-3000:]
    noted = {finding["name"] for finding in run.report["findings"]}
    assert "tool_media_not_shown" in noted
