"""What to install for an extra is a command that works for the installation at hand."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path

import pytest

from rolltap import extras
from rolltap.extras import install_line

ROOT = Path(__file__).parents[3]
COMMIT = "0" * 40


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        ({"url": "file:///a%20b/rolltap", "dir_info": {"editable": True}}, "pip install -e '/a b/rolltap[train]'"),
        ({"url": "file:///c/rolltap", "dir_info": {}}, "pip install '/c/rolltap[train]'"),
        (
            {"url": "https://h/r.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"pip install 'rolltap[train] @ git+https://h/r.git@{COMMIT}'",
        ),
        ({"url": "file:///r.whl", "archive_info": {}}, "pip install 'rolltap[train] @ file:///r.whl'"),
        (None, "pip install -e '.[train]' in rolltap's checkout"),
    ],
)
def test_an_extra_is_installed_from_where_rolltap_was(
    origin: dict[str, object] | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps(origin) if origin else None
    record(monkeypatch, {"direct_url.json": text, "INSTALLER": "pip\n"})
    assert install_line("train") == line


@pytest.mark.parametrize(
    ("environment", "file", "installer", "line"),
    [
        ("pipx/venvs/rolltap", "pipx_metadata.json", "uv", "pipx runpip rolltap install SPEC"),
        ("pipx/venvs/rolltap", "pipx_metadata.json", "pip", "pipx runpip rolltap install SPEC"),
        ("uv/tools/rolltap", "uv-receipt.toml", "uv", "uv pip install --python HERE SPEC"),
        ("uv/archive-v0/8ezcf", "pyvenv.cfg", "uv", "uvx --from SPEC rolltap"),
        (".venv", "pyvenv.cfg", "uv", "uv pip install --python HERE SPEC"),
    ],
)
def test_an_extra_is_installed_by_the_tool_that_installed_rolltap(
    environment: str, file: str, installer: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pipx and uvx keep environments of their own: another `pip` would install beside them, and change nothing."""
    prefix = tmp_path / environment
    prefix.mkdir(parents=True)
    (prefix / file).touch()
    monkeypatch.setattr("sys.prefix", str(prefix))
    record(monkeypatch, {"direct_url.json": '{"url": "file:///r.whl"}', "INSTALLER": f"{installer}\n"})
    spec = "'rolltap[train] @ file:///r.whl'"
    assert install_line("train") == line.replace("HERE", shlex.quote(str(prefix))).replace("SPEC", spec)


def record(monkeypatch: pytest.MonkeyPatch, files: dict[str, str | None]) -> None:
    """What the installer has written down of rolltap, for this test."""
    monkeypatch.setattr(extras, "_recorded", lambda name: files[name] or "")


def test_this_installations_line_names_its_own_folder() -> None:
    words = shlex.split(install_line("train"))
    assert {"pip", "install"} <= set(words)
    assert Path(words[-1].removesuffix("[train]")).samefile(ROOT)


def test_nothing_sends_a_user_to_a_name_that_is_not_ours() -> None:
    """The name is registered on no index: whoever takes it gets those who type such a line."""
    bare = re.compile(r"""pip install ['"]?rolltap\b""")
    files = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("examples/**/*.md")]
    for top in ("src/rolltap", "proxy", "reconstructor", "trainer_client", "harnesses", "examples"):
        files += (ROOT / top).glob("**/*.py")
    named = [str(path.relative_to(ROOT)) for path in files if bare.search(path.read_text(encoding="utf-8"))]
    assert [name for name in named if name != "src/rolltap/extras.py"] == []


def test_the_extra_brings_all_that_renderers_imports() -> None:
    """Beside what renderers itself asks for: what only another package's dependency brought may be gone tomorrow."""
    package = find_spec("renderers")
    assert package is not None
    assert package.origin is not None
    pages = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(package.origin).parent.glob("*.py")]
    lines = [statement for page in pages for statement in page.body]
    modules = {alias.name for line in lines if isinstance(line, ast.Import) for alias in line.names}
    modules |= {line.module or "" for line in lines if isinstance(line, ast.ImportFrom) and not line.level}
    owners = packages_distributions()
    outside = {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names) - {"renderers"}
    asked = {name(line) for line in requires("renderers") or () if "extra ==" not in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked |= {name(line) for line in (*project["dependencies"], *project["optional-dependencies"]["tokens"])}
    asked.add("pydantic")  # pydantic-settings, which every installation has, is made for it
    missing = {module for module in outside if not asked & {name(owner) for owner in owners[module]}}
    assert missing == set()


def name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")
