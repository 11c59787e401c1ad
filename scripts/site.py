"""What the documentation's site adds to docs/: the README as its start, a page a harness, references from the code.

MkDocs calls the functions here (`hooks` in mkdocs.yml). Links that leave docs/ lead to the repository.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from rolltap.cli.harness import comment, exports
from rolltap.harnesses.agents.registry import HARNESSES, release_results
from rolltap.harnesses.base import Command, Endpoint, Harness, Job
from rolltap.proxy.front.access import ADMIN_PLANE, TRAINER_PLANE, Table
from rolltap.proxy.planes.apps import admin_app, trainer_app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LISTED = {"Decisions": "adr", "Notes": "notes"}
"""Parts of the navigation that are a folder's pages."""
EACH_HARNESS = "Each harness"
ENDPOINT = Endpoint("http://127.0.0.1:8710/s/SESSION", "KEY", "my-model")
LINK = re.compile(r"(?P<before>\]\()(?P<path>[^)#:\s]+)(?P<rest>(?:#[^)\s]*)?\))")
PYTHON = {
    "The record": ("rolltap.record", "rolltap.reading.tables"),
    "Leases": (
        "rolltap.trainer_client.lease.client",
        "rolltap.contract.planes",
        "rolltap.contract.control",
        "rolltap.trainer_client.lease.push",
    ),
    "Recipes": (
        "rolltap.trainer_client.recipes.base",
        "rolltap.trainer_client.data.step",
        "rolltap.trainer_client.run.planning",
        "rolltap.trainer_client.recipes.estimators",
    ),
    "Reconstruction": ("rolltap.reconstructor.reconstruct", "rolltap.reconstructor.rules"),
    "Types and errors": ("rolltap.types", "rolltap.errors"),
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills the parts of the navigation that list a folder."""
    for part in config.nav or []:
        entries = next(iter(part.values()))
        if isinstance(entries, list):
            _fill(entries)
        elif (name := next(iter(part))) in LISTED:
            part[name] = _pages(LISTED[name])
    return config


def _fill(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        for name in entry:
            if name in LISTED:
                entry[name] = _pages(LISTED[name])
            elif name == EACH_HARNESS:
                entry[name] = [{harness: f"harnesses/{harness}.md"} for harness in HARNESSES]


def _pages(folder: str) -> list[str]:
    return sorted((str(page.relative_to(DOCS)) for page in (DOCS / folder).glob("*.md")), key=_readme_first)


def _readme_first(page: str) -> tuple[bool, str]:
    return not page.endswith("README.md"), page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that stand in no file of docs/."""
    generated = {"index.md": _start(config.repo_url or ""), "reference/python.md": _python()}
    generated |= {f"harnesses/{name}.md": "\n".join(_harness(harness)) for name, harness in HARNESSES.items()}
    for name, make, table in (("admin", admin_app, ADMIN_PLANE), ("trainer", trainer_app, TRAINER_PLANE)):
        schema = make(MagicMock(), MagicMock()).openapi()
        generated[f"reference/{name}.json"] = json.dumps(schema)
        generated[f"reference/{name}.md"] = "\n".join(_plane(name, schema, table))
    for path, content in generated.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/, to code and its READMEs, lead to the repository."""
    source = page.file.abs_src_path
    return _to_repository(markdown, Path(source).parent, config.repo_url or "") if source else markdown


def _to_repository(markdown: str, folder: Path, repository: str) -> str:
    def link(match: re.Match[str]) -> str:
        target = (folder / match["path"]).resolve()
        if (target.is_relative_to(DOCS) and target.is_file()) or not target.exists():
            return match[0]  # one of ours, or a broken one: MkDocs says so
        return f"{match['before']}{repository}/blob/main/{target.relative_to(ROOT)}{match['rest']}"

    return LINK.sub(link, markdown)


def _start(repository: str) -> str:
    text = _to_repository((ROOT / "README.md").read_text(encoding="utf-8"), ROOT, repository)
    return text.replace("](docs/", "](")


def _harness(harness: Harness) -> Iterator[str]:
    """How to point one harness at rolltap, which of its releases ran, and what is known of it."""
    name, package = harness.name, harness.package
    yield f"# {name}\n"
    yield f"Speaks `{harness.dialect}` ([dialects](../dialects.md)). Of all harnesses: [harnesses](../harnesses.md).\n"
    launch = harness.launch(Job(ENDPOINT, "PROMPT", Path("/work"), Path("~")))
    if isinstance(launch, Command):
        files = [comment(f"it reads ~/{path}") for path in launch.files]
        lines = "\n".join([*exports(launch.env), *files, comment(f"then: {shlex.join(launch.argv)}")])
        yield "## Point your own at rolltap\n"
        yield f"`rolltap harness env {name}` opens a session of the running server and prints this, filled in:\n"
        yield f"```\n{lines}\n```\n"
        yield f"`rolltap run {name} -- PROMPT` does all of it, in a sandbox.\n"
    else:
        yield "It runs inside the runner: `rolltap run TASKS --harness " + name + "`.\n"
    yield "## Releases that ran\n"
    yield "| release | on | runs as expected |\n|---|---|---|"
    for tested in release_results(name):
        yield f"| {package.name if package else name} {tested.release} | {tested.day} | {tested.result} |"
    if harness.quirks:
        yield "\n## Know before you look for it\n"
        yield from (f"* {quirk}" for quirk in harness.quirks)


def _python() -> str:
    parts = [
        "# Python reference",
        "What trainers, scripts and recipes import. `import rolltap` gives `open` and `open_async`.",
    ]
    for title, modules in PYTHON.items():
        parts += [f"## {title}", *(f"::: {module}\n    options: {{heading_level: 3}}" for module in modules)]
    return "\n\n".join(parts)


def _plane(name: str, schema: Mapping[str, Any], table: Table) -> Iterator[str]:
    """A plane's routes with their keys, what they take and answer, and the fields of every type that they name."""
    yield f"# {name.capitalize()} plane\n"
    yield f"The same as OpenAPI, for tools and generated clients: [{name}.json]({name}.json)."
    yield "A key goes into `Authorization: Bearer ...`; [security](../security.md) says how to make one."
    yield "Every answer that is not a success is an [ErrorAnswer](#erroranswer).\n"
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            yield f"## {method.upper()} {path}\n"
            yield operation.get("description", operation.get("summary", "")) + "\n"
            asked = table.get(f"{method.upper()} {path}")
            yield f"Keys: {', '.join(asked.roles) if asked else 'none needed'}.\n"
            yield from _parameters(operation)
            if body := operation.get("requestBody"):
                yield f"Takes {_content(body['content'])}.\n"
            for status, answer in operation["responses"].items():
                if status != "default":
                    yield f"{status}: {_content(answer.get('content', {}))}.\n"
    yield "# Types\n"
    for name, kind in sorted(schema.get("components", {}).get("schemas", {}).items()):
        yield f"## {name}\n"
        yield _cell(kind.get("description", "")).replace("<br>", " ") + "\n"
        if properties := kind.get("properties"):
            yield "| field | type | what it is |\n|---|---|---|"
            for field, value in properties.items():
                needed = " (required)" if field in kind.get("required", ()) else ""
                yield f"| `{field}`{needed} | {_type(value)} | {_cell(value.get('description', ''))} |"
            yield ""


def _parameters(operation: Mapping[str, Any]) -> Iterator[str]:
    parameters = [one for one in operation.get("parameters", ()) if one["in"] in ("query", "path")]
    if not parameters:
        return
    yield "| parameter | in | type | what it is |\n|---|---|---|---|"
    for one in parameters:
        needed = " (required)" if one.get("required") else ""
        meaning = _cell(one.get("description", ""))
        yield f"| `{one['name']}`{needed} | {one['in']} | {_type(one['schema'])} | {meaning} |"
    yield ""


def _content(content: Mapping[str, Any]) -> str:
    if not content:
        return "nothing"
    kind, details = next(iter(content.items()))
    inner = _type(details.get("schema", {}))
    return inner if kind == "application/json" else f"`{kind}`"


def _type(schema: Mapping[str, Any]) -> str:
    if reference := schema.get("$ref"):
        name = reference.rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(_type(option) for option in options)
    if items := schema.get("prefixItems"):
        return f"list of {', '.join(_type(item) for item in items)}"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"map of {_type(schema['additionalProperties'])}"
    return str(schema.get("type", "any"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
