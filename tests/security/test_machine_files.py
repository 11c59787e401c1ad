"""Root's sandboxes run as the machine's root, without its capabilities: what root owns could be theirs to change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rolltap.harnesses.base import Command, Limits
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime, refusal
from rolltap.harnesses.runtimes.sources import Files

pytestmark = [
    pytest.mark.skipif(bool(refusal()), reason="this machine allows no sandbox"),
    pytest.mark.skipif(os.geteuid() != 0, reason="others own nothing of the machine's"),
]
SETTINGS = "find /proc -type f -writable -not -path '/proc/[0-9]*' -not -path '/proc/*self/*' 2> /dev/null"
DEVICES = "for device in /dev/*; do test -c $device && chmod +t $device; done; ls -l /dev | grep -c '^c.*t '"
USE = """
set -e
echo gone > /dev/null; echo gone >> /dev/null
test $(head -c 4 /dev/zero | wc -c) = 4 && test $(head -c 4 /dev/urandom | wc -c) = 4
! echo full > /dev/full
echo seen > /dev/stdout
python3 -c 'import os, pty; pty.openpty(); open("/dev/null", "w+").close()'
"""


def device_modes() -> dict[Path, int]:
    return {path: path.stat().st_mode for path in Path("/dev").iterdir() if path.is_char_device()}


async def output(folder: Path, script: str) -> str:
    workspace = await BubblewrapRuntime(folder).prepare(Files({}))
    try:
        return (await workspace.run(Command(("/bin/bash", "-c", script)), Limits(), 60)).output
    finally:
        await workspace.close()


async def test_no_setting_of_the_kernel_can_be_written(tmp_path: Path) -> None:
    assert await output(tmp_path, SETTINGS) == ""


async def test_no_device_of_the_machine_is_changed(tmp_path: Path) -> None:
    before, names = device_modes(), set(os.listdir("/dev"))
    try:
        changed = int(await output(tmp_path, DEVICES))
        assert device_modes() == before
        assert changed >= 6, "its own may be changed"
        assert set(os.listdir("/dev")) == names
    finally:
        for path, mode in before.items():
            path.chmod(mode & 0o7777)


async def test_devices_do_what_they_do_elsewhere(tmp_path: Path) -> None:
    assert (await output(tmp_path, USE)).splitlines()[-1] == "seen"
