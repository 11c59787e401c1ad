"""The files in `deploy/` agree with each other, and start a node agent with options that there are."""

from __future__ import annotations

import configparser
import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from rolltap.cli.main import app
from rolltap.harnesses.runtimes.bubblewrap import BOTH, REFUSED, SYSTEM, WALLS
from rolltap.settings import LimitSettings

from ...conftest import program

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"


def parsed(words: list[str]) -> dict[str, object]:
    """What `rolltap WORDS` is given; a usage error where an option is unknown."""
    commands: Any = typer.main.get_command(app)
    command = commands.get_command(None, words[0])
    return command.make_context(words[0], list(words[1:])).params


def test_the_kubernetes_job_runs_nodes_until_nothing_is_left() -> None:
    job = yaml.safe_load((DEPLOY / "kubernetes" / "nodes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = parsed(container["args"])
    assert (given["until_idle"], given["slots"], given["runtime"]) == (True, 8, "bubblewrap")
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert str(given["workspaces"]) == container["volumeMounts"][0]["mountPath"]
    assert [variable["name"] for variable in container["env"]] == ["ROLLTAP_ADMIN_URL", "ROLLTAP_RUNNER_KEY"]


SANDBOXES = ("mount", "umount2", "pivot_root", "unshare")
"""What a node needs of the calls that its sandboxes refuse their agents."""

UNDER_PROFILE = """
import ctypes, json, os, sys
library, profile = ctypes.CDLL("libseccomp.so.2"), json.load(open(sys.argv[1]))
library.seccomp_init.restype = ctypes.c_void_p
context = ctypes.c_void_p(library.seccomp_init(0x7FFF0000))
names = [name.encode() for each in profile["syscalls"] for name in each["names"]]
numbers = [library.seccomp_syscall_resolve_name(name) for name in names]
for number in numbers:
    assert number != -1
    library.seccomp_rule_add_array(context, 0x00050001, number, 0, None)
assert library.seccomp_load(context) == 0
libc = ctypes.CDLL(None, use_errno=True)
for number in numbers:
    if number >= 0:  # negative: this machine has no such call
        assert libc.syscall(number, -1, -1, -1, -1) == -1 and ctypes.get_errno() == 1, number
print(*sorted(number for number in numbers if number >= 0), flush=True)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def test_the_pods_seccomp_profile_lets_sandboxes_be_made_and_refuses_the_rest_of_what_they_refuse() -> None:
    profile = DEPLOY / "kubernetes" / "node-seccomp.json"
    sandbox = ["bwrap", *WALLS, *SYSTEM, "--", "/bin/echo", "made"]
    command = [sys.executable, "-c", UNDER_PROFILE, str(profile), *sandbox]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    numbers, made = done.stdout.splitlines()
    assert made == "made"
    library = ctypes.CDLL("libseccomp.so.2")
    needed = {library.seccomp_syscall_resolve_name(name.encode()) for name in SANDBOXES}
    assert {*BOTH, *REFUSED[platform.machine()][1]} - needed <= set(map(int, numbers.split()))


def instructions() -> list[tuple[str, str]]:
    """Those of the Dockerfile, each with its arguments."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, given) for name, given in lines]


def test_the_image_is_the_one_that_the_kubernetes_job_runs() -> None:
    pod = yaml.safe_load((DEPLOY / "kubernetes" / "nodes.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert f"docker build -f deploy/Dockerfile -t {container['image']} ." in (DEPLOY / "Dockerfile").read_text()
    last = dict(instructions())
    assert int(last["USER"]) == container["securityContext"]["runAsUser"]
    assert json.loads(last["ENTRYPOINT"]) == ["rolltap"]
    assert str(parsed(json.loads(last["CMD"]))["workspaces"]) == container["volumeMounts"][0]["mountPath"]


def test_the_image_holds_the_whole_package_and_what_its_runtime_needs() -> None:
    copied = [name for instruction, given in instructions() if instruction == "COPY" for name in given.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    links = [path for path in (ROOT / "src" / "rolltap").iterdir() if path.is_symlink()]
    assert {path.resolve().relative_to(ROOT).parts[0] for path in links} <= set(copied)
    installed = next(given for instruction, given in instructions() if instruction == "RUN" and "apt-get" in given)
    assert {"bubblewrap", "git"} <= set(installed.split())


def test_the_slurm_array_runs_a_node_a_task(tmp_path: Path) -> None:
    script = DEPLOY / "slurm" / "nodes.sbatch"
    command = tmp_path / "rolltap"
    command.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    command.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    keys = {"ROLLTAP_ADMIN_URL": "http://10.0.0.1:8712", "ROLLTAP_RUNNER_KEY": "k", "SLURM_CPUS_PER_TASK": "8"}
    done = subprocess.run(["bash", script], env={**env, **keys}, capture_output=True, text=True, check=True)
    given = parsed(json.loads(done.stdout))
    assert (given["name"], given["slots"], given["until_idle"]) == ("slurm-7-3", 8, True)
    without = subprocess.run(["bash", script], env=env, capture_output=True, text=True, check=False)
    assert without.returncode != 0
    assert "ROLLTAP_ADMIN_URL: the admin plane" in without.stderr


def test_an_option_that_there_is_not_is_refused() -> None:
    with pytest.raises(Exception, match="No such option"):
        parsed(["node", "--until-tea"])


def test_nginx_takes_its_configuration(tmp_path: Path) -> None:
    site = DEPLOY / "nginx" / "rolltap.conf"
    whole = tmp_path / "nginx.conf"
    whole.write_text(
        f"pid {tmp_path}/pid;\nerror_log {tmp_path}/error.log;\nevents {{ }}\n"
        f"http {{\n  access_log off;\n  include {site};\n}}\n"
    )
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    checked = subprocess.run([nginx, "-t", "-c", str(whole), "-e", str(tmp_path / "error.log")], capture_output=True)
    assert checked.returncode == 0, checked.stderr
    assert "proxy_buffering off" in site.read_text()


def test_systemd_takes_its_unit() -> None:
    """It ends with 0 also if it ignores a line, and says so."""
    command = [program("systemd-analyze"), "verify", DEPLOY / "systemd" / "rolltap.service"]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_systemd_waits_until_calls_in_flight_are_over() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "systemd" / "rolltap.service")
    limits = LimitSettings()
    assert unit.getint("Service", "TimeoutStopSec") > limits.drain_s + limits.unready_s
    started = unit["Service"]["ExecStart"].split()
    assert parsed(started[started.index("serve") :])["log_format"] == "json"
