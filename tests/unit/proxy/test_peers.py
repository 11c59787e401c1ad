"""Proxies on one Postgres: those with another secret than the running one's don't start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rolltap.calllog import processes
from rolltap.calllog.processes import KeysMark
from rolltap.errors import ConfigError
from rolltap.proxy.app import Rolltap
from rolltap.settings import KeySettings, Settings


def settings(data: Path, store: str, **keys: str) -> Settings:
    return Settings.model_validate(
        {
            "data": data,
            "store": {"url": store},
            "keys": keys,
            "engines": {"up": {"kind": "openai_compatible", "url": "http://127.0.0.1:9"}},
            "policies": {"p": {"engine": "up"}},
        }
    )


async def test_another_secret_is_refused_while_a_proxy_runs(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "GONE_WITHIN_S", 0.3)
    async with Rolltap.running(settings(tmp_path / "one", postgres_url)) as one:
        with pytest.raises(ConfigError, match=r"another proxy on postgresql://.* has a different keys\.secret"):
            async with Rolltap.running(settings(tmp_path / "two", postgres_url)):
                pass
        monkeypatch.setattr(processes, "GONE_WITHIN_S", 3.0)  # the refused one's connections may take a while to end
        async with Rolltap.running(settings(tmp_path / "one", postgres_url), spool=tmp_path / "spool"):  # a worker
            pass
        assert "different keys" not in caplog.text
        async with Rolltap.running(settings(tmp_path / "two", postgres_url, secret=one.settings.keys.secret)):
            assert "has different keys: only one" in caplog.text
    async with Rolltap.running(settings(tmp_path / "three", postgres_url)):  # none of them runs any more
        pass


async def test_other_keys_and_policies_are_noticed_by_the_proxy_that_runs_too(
    tmp_path: Path, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = settings(tmp_path / "one", postgres_url, secret="a-long-common-secret")
    second = settings(tmp_path / "two", postgres_url, secret="a-long-common-secret")
    second = second.model_copy(update={"policies": {**second.policies, "q": second.policies["p"]}})
    async with Rolltap.running(first) as one:
        assert one.services.peers.differences == {}
        async with Rolltap.running(second) as two:
            assert set(two.services.peers.differences) == {"has different keys", "has other policies"}
            caplog.clear()
            assert await one.services.peers.look() == two.services.peers.differences
            assert "has other policies: calls of a policy that it lacks get 404" in caplog.text
        async with asyncio.timeout(10):
            while await one.services.peers.look():  # noqa: ASYNC110  the end of its connections is Postgres's event
                await asyncio.sleep(0.05)


def test_a_mark_tells_nothing_but_whether_keys_are_the_same() -> None:
    keys = KeySettings(secret="a-long-secret", admin="an-admin-key")
    mark = KeysMark.of(keys, ["p"])
    assert mark == KeysMark.of(keys.model_copy(), ["p"]) != KeysMark.of(keys, ["p", "q"])
    assert mark.of_secret == KeysMark.of(keys.model_copy(update={"admin": "another"})).of_secret
    assert mark.of_others != KeysMark.of(keys.model_copy(update={"admin": "another"})).of_others
    assert len(mark.application) < 64, "Postgres would cut it"
    assert not any(text in mark.application for text in ("a-long-secret", "an-admin-key"))
