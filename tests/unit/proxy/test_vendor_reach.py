"""What a session's key reaches of a vendor under the settings' key: its own model calls and no more."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from yarl import URL

from rolltap.errors import InvalidRequest
from rolltap.proxy.engines.passthrough import vendor_path

from .test_vendors import Stage, staged

OURS = {"api_key": "CANARY-OF-THE-SETTINGS"}
ESCAPES = [
    ("GET", "/v1/models/%252e%252e/files"),
    ("GET", "/v1/models/%252e%252e/files/file-abc/content"),
    ("GET", "/v1/models/%252E%252E/organization/users"),
    ("POST", "/v1beta/models/%252e%252e/%252e%252e/upload/v1beta/files%23:generateContent"),
    ("POST", "/v1beta/models/%252e%252e/%252e%252e/v1/fine_tuning/jobs%3f:generateContent"),
    ("GET", "/v1/models/../files"),
    ("GET", "/v1/models/%2e%2e/files"),
    ("GET", "/v1/models/a%2f..%2f..%2ffiles"),
    ("GET", "/v1/models/m%3fx=y"),
    ("GET", "/v1/models/m%23x"),
    ("GET", "/v1/models/m%5c..%5cfiles"),
    ("GET", "/v1/models/m%00"),
    ("GET", "/v1/models/gemini-pro/operations"),
    ("GET", "/v1beta/models/m/operations"),
    ("GET", "/v1/responses/%252e%252e%252ffiles"),
    ("GET", "/v1/responses/resp_of_another_session"),
    ("GET", "/v1/models?purpose=fine-tune"),
]


async def asked(stage: Stage, method: str, target: str, **headers: str) -> int:
    """The status of a request whose target goes out as it stands here."""
    _, key = await stage.app.services.sessions.open()
    address = URL(f"http://{urlsplit(str(stage.client.base_url)).netloc}{target}", encoded=True)
    keys = {"authorization": f"Bearer {key}", "x-goog-api-key": key}
    async with (
        aiohttp.ClientSession() as http,
        http.request(
            method, address, data=b'{"contents": []}' if method == "POST" else None, headers={**keys, **headers}
        ) as answer,
    ):
        return answer.status


@pytest.mark.parametrize(("method", "target"), ESCAPES)
async def test_no_other_part_of_a_vendors_api_is_reached(tmp_path: Path, method: str, target: str) -> None:
    async with staged(tmp_path, "openai_chat", engine=OURS) as stage:
        assert await asked(stage, method, target) in (400, 401, 404, 405)
    assert [seen.path_qs for seen, _ in stage.vendor.seen] == []


@pytest.mark.parametrize(
    "value", ["", ".", "..", "a..b", "a/b", "a\\b", "m?x=y", "m#x", "m%2f", "m\n", "m x", "é", "m" * 201]
)
def test_only_a_plain_name_takes_a_place_in_a_path(value: str) -> None:
    route = "/v1/models/{model:path}"
    assert vendor_path(route, {"model": "ft:gpt-4.1@eu"}) == "/v1/models/ft:gpt-4.1@eu"
    with pytest.raises(InvalidRequest, match="is not a valid name"):
        vendor_path(route, {"model": value})


async def test_a_plain_name_reaches_the_vendor(tmp_path: Path) -> None:
    async with staged(tmp_path, "openai_chat", engine=OURS) as stage:
        assert await asked(stage, "GET", "/v1/models/ft:gpt-4.1:org::a1?limit=2") == 200
    (seen, _) = stage.vendor.seen[0]
    assert (seen.path_qs, seen.headers["authorization"]) == (
        "/v1/models/ft:gpt-4.1:org::a1?limit=2",
        "Bearer CANARY-OF-THE-SETTINGS",
    )


async def test_only_known_headers_go_to_a_vendor(tmp_path: Path) -> None:
    sent = {
        "openai-organization": "org-of-another",
        "openai-project": "p",
        "x-forwarded-for": "1.2.3.4",
        "x-http-method-override": "DELETE",
        "x-rolltap": "1",
        "openai-beta": "responses=v1",
    }
    async with staged(tmp_path, "openai_chat", engine=OURS) as stage:
        assert await asked(stage, "GET", "/v1/models", **sent) == 200
    (seen, _) = stage.vendor.seen[0]
    assert {name.lower() for name in seen.headers} & set(sent) == {"openai-beta"}


async def test_the_users_own_account_is_the_users_to_choose(tmp_path: Path) -> None:
    async with staged(tmp_path, "openai_chat") as stage:
        await stage.post(**{"openai-organization": "mine", "x-forwarded-for": "1.2.3.4"})
    (seen, _) = stage.vendor.seen[0]
    assert (seen.headers["openai-organization"], "x-forwarded-for" in seen.headers) == ("mine", False)


@pytest.mark.parametrize(("alias", "refused"), [("gpt-small", 404), ("*", 200)])
async def test_the_settings_bound_the_models_under_their_key(tmp_path: Path, alias: str, refused: int) -> None:
    async with staged(tmp_path, "openai_chat", engine=OURS, policy={"aliases": [alias]}) as stage:
        _, key = await stage.app.services.sessions.open()
        ask = dict(stage.wire.ask)
        statuses = []
        for model in ("gpt-small", "most-expensive-model"):
            answer = await stage.client.post(
                stage.wire.path, json={**ask, "model": model}, headers={"authorization": f"Bearer {key}"}
            )
            statuses.append(answer.status_code)
    assert statuses == [200, refused]
    assert len(stage.vendor.seen) == statuses.count(200)
