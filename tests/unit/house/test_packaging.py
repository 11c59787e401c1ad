"""The wheel is the repository: it holds every tracked file of the package, and imports in a clean environment."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.packaging, pytest.mark.timeout(300)]

LINKED = ("proxy", "reconstructor", "trainer_client", "harnesses")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the tracked files, as pip builds it from a checkout."""
    source = tmp_path_factory.mktemp("source")
    archive = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in archive.decode().split("\0"):
        path = ROOT / name
        if not name or not (path.exists() or path.is_symlink()):
            continue
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            target.symlink_to(path.readlink())
        else:
            target.write_bytes(path.read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(source)]
    result = subprocess.run(build, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    (built,) = out.glob("*.whl")
    return built


def tracked() -> set[str]:
    """The package's tracked files, by their path in the wheel."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    found = {name.removeprefix("src/") for name in names if name.startswith("src/rolltap/")}
    found = {name for name in found if not (ROOT / "src" / name).is_symlink()}
    return found | {f"rolltap/{name}" for name in names if name.split("/")[0] in LINKED and "/" in name}


def test_the_wheel_holds_every_tracked_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert tracked() - packed == set()
    assert packed - tracked() == set()


def test_the_wheel_imports_without_extras(wheel: Path, tmp_path: Path) -> None:
    """20 CPU seconds: pip installs 46 packages."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    result = subprocess.run(install, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    check = (
        "import rolltap.proxy.app, rolltap.cli.main, rolltap.reconstructor.reconstruct, "
        "rolltap.trainer_client.lease.client, rolltap.harnesses.runner.attempts, sys; assert 'torch' not in sys.modules"
    )
    result = subprocess.run([str(python), "-c", check], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    listed = subprocess.run([str(python), "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    packages = [line.split()[0] for line in listed.splitlines()[2:]]
    others = [name for name in packages if name not in ("pip", "setuptools", "rolltap")]
    assert len(others) <= 46, others
