"""What can be said of Harbor's tasks and agents without Harbor; the rest runs in tests/harnesses/test_harbor.py."""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import PackageNotFoundError
from pathlib import Path, PurePosixPath

import pytest
from typer.testing import CliRunner

from rolltap.cli.main import app
from rolltap.errors import ConfigError, RuntimeFailed, TaskInvalid
from rolltap.harnesses import harbor
from rolltap.harnesses.base import Endpoint
from rolltap.harnesses.harbor import UntestedHarbor, check_installed
from rolltap.harnesses.harbor.dockerfile import CopyStep, RunStep, read_build_steps
from rolltap.harnesses.harbor.names import connection_to, installation_of

ENDPOINT = Endpoint("http://127.0.0.1:1/s/x", "key", "tiny")


def folder(tmp_path: Path, dockerfile: str) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.csv").write_text("1\n")
    (tmp_path / "a.txt").write_text("x\n")
    (tmp_path / "Dockerfile").write_text(dockerfile)
    return tmp_path


def test_a_dockerfile_is_followed_in_its_order(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        "# a comment\nFROM python:3.12 AS base\nENV ROOT=/srv NAME='a b'\nWORKDIR $ROOT\nCOPY a.txt data/ ./in/\n"
        "ADD a.txt b.txt\nRUN mkdir -p out && \\\n  # why\n  echo ${NAME} > out/name\nWORKDIR sub\nCOPY data /data\n"
        'CMD ["bash"]\n',
    )
    build = read_build_steps(path)
    srv = PurePosixPath("/srv")
    assert build.workdir == srv / "sub"
    assert build.env == {"ROOT": "/srv", "NAME": "a b"}
    assert build.steps == [
        CopyStep(path / "a.txt", srv / "in", "a.txt"),
        CopyStep(path / "data", srv / "in"),
        CopyStep(path / "a.txt", srv, "b.txt"),
        RunStep("mkdir -p out && echo ${NAME} > out/name", srv),
        CopyStep(path / "data", PurePosixPath("/data")),
    ]


def test_without_a_dockerfile_the_folder_is_copied(tmp_path: Path) -> None:
    assert read_build_steps(tmp_path).steps == [CopyStep(tmp_path, PurePosixPath("/app"))]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("USER nobody", "another system than this machine's"),
        ("COPY --from=build /x /y", "there are no other images"),
        ("COPY ../secret /app/", "leaves the task's folder"),
        ("COPY missing.txt /app/", "no file 'missing.txt'"),
        ("ADD https://example.org/x /app/", "no file"),
        ("RUN <<END", "only a plain command"),
        ("COPY 'open", "No closing quotation"),
    ],
)
def test_what_needs_docker_is_refused_with_its_line(line: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(TaskInvalid, match=reason) as refused:
        read_build_steps(folder(tmp_path, f"FROM x\n\n{line}\n"))
    assert f"Dockerfile:3: {line.split()[0]} can't be followed without Docker" in refused.value.message


def test_compose_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(TaskInvalid, match="no services"):
        read_build_steps(tmp_path)


@pytest.mark.parametrize(
    ("agent", "dialect", "model", "url"),
    [
        ("claude-code", "", "tiny", ("ANTHROPIC_BASE_URL", ENDPOINT.base_url)),
        ("codex", "", "tiny", ("OPENAI_BASE_URL", ENDPOINT.v1)),
        ("gemini-cli", "", "tiny", ("GOOGLE_GEMINI_BASE_URL", ENDPOINT.base_url)),
        ("opencode", "", "openai/tiny", ("OPENAI_BASE_URL", ENDPOINT.v1)),
        ("opencode", "anthropic", "anthropic/tiny", ("ANTHROPIC_BASE_URL", ENDPOINT.base_url)),
    ],
)
def test_an_agent_is_told_of_its_session(agent: str, dialect: str, model: str, url: tuple[str, str]) -> None:
    connection = connection_to(ENDPOINT, agent, dialect)
    assert connection.model == model
    name, value = url
    assert connection.env == {name: value, name.split("_", 1)[0].replace("GOOGLE", "GEMINI") + "_API_KEY": "key"}


@pytest.mark.parametrize(("agent", "dialect"), [("codex", "anthropic"), ("opencode", "soap")])
def test_a_protocol_that_it_does_not_speak(agent: str, dialect: str) -> None:
    with pytest.raises(TaskInvalid, match=f"{agent} speaks .*, not {dialect!r}"):
        connection_to(ENDPOINT, agent, dialect)


def test_an_agent_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROLLTAP_HARNESSES", str(tmp_path))
    with pytest.raises(RuntimeFailed, match="rolltap harness install qwen-code"):
        installation_of("qwen-coder")
    assert installation_of("oracle") is None


def test_an_older_python_is_named() -> None:
    if sys.version_info >= (3, 12):
        with pytest.raises(ConfigError, match="not installed"):
            check_installed()
        return
    with pytest.raises(ConfigError, match=r"needs Python 3\.12 or later, this is 3\.11 .*python3\.12 -m venv"):
        check_installed()


def test_the_extra_is_named_and_an_untested_release_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harbor, "PYTHON", (3, 11))

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(harbor, "version", missing)
    with pytest.raises(ConfigError, match=r"Harbor is not installed: pip install .*\[harbor\]"):
        check_installed()
    monkeypatch.setattr(harbor, "version", lambda name: "0.26.0")
    with pytest.warns(UntestedHarbor, match=r"harbor 0\.26\.0 was not tested with rolltap; tested: 0\.24\.0, 0\.25\.0"):
        check_installed()
    monkeypatch.setattr(harbor, "version", lambda name: "0.24.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_installed()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tasks"], "--harbor needs one of its agents: -a NAME"),
        (["tasks", "-a", "codex", "--nodes"], "--harbor can't be with --nodes"),
        (["tasks", "-a", "codex", "--id", "x"], "--harbor can't be with --id"),
    ],
)
def test_options_that_do_not_go_with_harbor(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["run", "--harbor", *words])
    assert (result.exit_code, result.output) == (1, f"rolltap: {said}\n")
