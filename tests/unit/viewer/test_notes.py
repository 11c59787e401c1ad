"""Labels, scores and tags from the pages: for links that may, from this server's own pages only."""

from __future__ import annotations

import aiohttp
import pytest

from .conftest import HOSTILE, Viewed


@pytest.fixture
def viewed(viewed_by_all: Viewed) -> Viewed:
    return viewed_by_all


async def token_of(browser: aiohttp.ClientSession, admin: str) -> str:
    async with browser.get(f"{admin}/view/form") as response:
        assert response.status == 200
        return (await response.json())["token"]


async def add(browser: aiohttp.ClientSession, admin: str, token: str, **fields: str) -> tuple[int, str]:
    headers = {"x-rolltap-form": token} if token else {}
    async with browser.post(f"{admin}/view/notes", params=fields, headers=headers) as response:
        return response.status, await response.text()


async def browser_of(viewed: Viewed, role: str) -> aiohttp.ClientSession:
    """A browser whose link a minted key of the role made."""
    root = viewed.reading.home.app.settings.keys.admin
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {root}"}) as admin:
        async with admin.post(f"{viewed.admin}/keys", json={"role": role, "name": f"a-{role}"}) as response:
            key = (await response.json())["key"]
        async with admin.post(f"{viewed.admin}/view/links", headers={"Authorization": f"Bearer {key}"}) as response:
            path = (await response.json())["path"]
    browser = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))
    async with browser.get(f"{viewed.admin}{path}") as response:
        assert response.status == 200
    return browser


async def test_a_label_a_score_and_a_tag_are_added_and_shown(viewed: Viewed):
    talk = await viewed.reading.talk()
    await talk.two_turns()
    call = (await viewed.reading.reader.session(talk.session_id)).calls[0].id
    token = await token_of(viewed.browser, viewed.admin)
    for fields in (
        {"kind": "label", "name": "good", "session_id": talk.session_id},
        {"kind": "score", "name": "taste", "value": "0.75", "session_id": talk.session_id},
        {"kind": "tag", "name": "team", "value": HOSTILE.replace("\x1b", ""), "session_id": talk.session_id},
        {"kind": "comment", "value": "look here", "call_id": call},
    ):
        assert (await add(viewed.browser, viewed.admin, token, **fields))[0] == 200, fields
    detail = await viewed.reading.reader.session(talk.session_id)
    assert (detail.summary.labels, detail.summary.scores) == (("good",), {"taste": 0.75})
    assert [note.author for note in detail.notes] == ["viewer"] * 4
    shown = await viewed.get(f"/sessions/{talk.session_id}")
    assert "good</span>" in shown
    assert "0.750" in shown
    assert "<script>window" not in shown
    assert "look here" in await viewed.get(f"/calls/{call}")


async def test_what_is_no_note_is_refused_in_words(viewed: Viewed):
    talk = await viewed.reading.talk()
    token = await token_of(viewed.browser, viewed.admin)
    for fields, says in (
        ({"kind": "score", "name": "x", "value": "high", "session_id": talk.session_id}, "a score is a number"),
        ({"kind": "score", "name": "x", "value": "nan", "session_id": talk.session_id}, "finite"),
        ({"kind": "label", "name": " ", "session_id": talk.session_id}, "a label has a name"),
        ({"kind": "label", "name": "x", "session_id": "nobody"}, "no session 'nobody'"),
    ):
        status, text = await add(viewed.browser, viewed.admin, token, **fields)
        assert status in (400, 404)
        assert says in text


async def test_only_this_servers_own_pages_add(viewed: Viewed):
    talk = await viewed.reading.talk()
    fields = {"kind": "label", "name": "forged", "session_id": talk.session_id}
    token = await token_of(viewed.browser, viewed.admin)
    for forged in ("", token[:-1], "0" * 40):
        assert (await add(viewed.browser, viewed.admin, forged, **fields))[0] == 401
    headers = {"x-rolltap-form": token, "origin": "http://127.0.0.1:1"}
    async with viewed.browser.post(f"{viewed.admin}/view/notes", params=fields, headers=headers) as response:
        assert response.status == 403, "another port's page, which has the cookie"
    async with aiohttp.ClientSession() as stranger:
        assert (await add(stranger, viewed.admin, token, **fields))[0] == 401
    assert (await viewed.reading.reader.session(talk.session_id)).notes == ()


@pytest.mark.parametrize(("role", "may"), [("viewer", False), ("admin", True)])
async def test_a_viewers_link_only_reads(viewed: Viewed, role: str, may: bool):
    talk = await viewed.reading.talk()
    browser = await browser_of(viewed, role)
    async with browser:
        token = await token_of(browser, viewed.admin)
        assert bool(token) is may
        fields = {"kind": "label", "name": "mine", "session_id": talk.session_id}
        (cookie,) = browser.cookie_jar
        known = viewed.reading.home.app.view_access.form_token(cookie.value)
        status, text = await add(browser, viewed.admin, known, **fields)
        assert status == (200 if may else 403), text
    notes = (await viewed.reading.reader.session(talk.session_id)).notes
    assert len(notes) == may
