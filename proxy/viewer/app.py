"""The viewer as an application, mounted at `/view` of the admin plane or served by itself over a store.

Every page needs a cookie of `Access` or a key of the plane; only a key makes links. Nothing on these pages writes.
Answers carry a content policy that lets no recorded text run: scripts and styles come from this server's files only.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse

from rolltap.errors import RolltapError
from rolltap.proxy.viewer.access import COOKIE_S, Access, Viewers
from rolltap.proxy.viewer.one_file import one_file
from rolltap.proxy.viewer.pages import Pages
from rolltap.proxy.viewer.templating import ASSETS, ASSETS_HASH, render

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
OPEN_PATHS = ("/open", "/assets/")
Position = Annotated[int, Query(ge=0, lt=2**31)]
Start = Annotated[int, Query(alias="from", ge=0, lt=2**31)]


def viewer_app(pages: Pages, access: Access, viewers: Viewers) -> FastAPI:
    """The pages, for cookies of `access` and for the keys of `viewers`."""
    app = FastAPI(title="rolltap viewer", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RolltapError, _failed)
    app.middleware("http")(_guard(access, viewers))
    _add_entrance(app, access)
    _add_session_pages(app, pages)
    _add_group_pages(app, pages)
    _add_files(app, pages)
    return app


def mount(plane: FastAPI, pages: Pages, access: Access, viewers: Viewers) -> FastAPI:
    """Puts the pages at `/view` of a plane, and leads there from its root."""

    @plane.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("/view/", 303)

    plane.mount("/view", viewer_app(pages, access, viewers))
    return plane


def alone(pages: Pages, access: Access) -> FastAPI:
    """The pages without a plane."""
    return mount(FastAPI(docs_url=None, redoc_url=None, openapi_url=None), pages, access, Viewers())


def _guard(
    access: Access, viewers: Viewers
) -> Callable[[Request, Callable[[Request], Awaitable[Response]]], Awaitable[Response]]:
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        try:
            allowed = path.startswith(OPEN_PATHS) or await _admitted(request, access, viewers)
        except RolltapError as error:
            response = await _failed(request, error)
        else:
            response = await call_next(request) if allowed else _shut()
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        response.headers.setdefault("cache-control", "no-store")
        return response

    return guard


def _shut() -> Response:
    text = "A one-time link lets a browser in. On the server's machine, this makes one:"
    page = render("message.html", heading="This page needs a link", text=text, command="rolltap view")
    return HTMLResponse(page, 401)


async def _admitted(request: Request, access: Access, viewers: Viewers) -> bool:
    """Whether the request has a key, whose id is kept for the route, or reads with a cookie whose key goes on."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and (key_id := await viewers.key_id(key.strip())) is not None:
        request.state.key_id = key_id
        return True
    holder = access.holder(request.cookies.get(access.cookie)) if request.method in ("GET", "HEAD") else None
    return holder is not None and await viewers.go_on(holder)


async def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, RolltapError)
    page = render("message.html", heading="This can't be shown", text=error.message, command="")
    return HTMLResponse(page, error.status)


def _add_entrance(app: FastAPI, access: Access) -> None:
    @app.get("/open")
    async def open_link(token: str = "") -> Response:
        cookie = access.redeem(token)
        if cookie is None:
            text = "It was used before, or is older than 15 minutes. This makes a new one:"
            page = render("message.html", heading="This link is over", text=text, command="rolltap view")
            return HTMLResponse(page, 403)
        # A page that goes on by itself, not a redirect: a link followed from elsewhere would not carry a strict cookie.
        response = HTMLResponse(render("opened.html"))
        response.set_cookie(access.cookie, cookie, max_age=COOKIE_S, path="/view", httponly=True, samesite="strict")
        return response

    @app.post("/links")
    async def new_link(request: Request) -> dict[str, str]:
        """A one-time link, by its path."""
        return {"path": f"/view/open?token={access.new_link(request.state.key_id)}"}

    @app.get("/assets/{version}/{name}")
    async def asset(version: str, name: str) -> Response:
        if name not in ASSETS:
            return Response(status_code=404)
        cache = "public, max-age=31536000, immutable" if version == ASSETS_HASH else "no-store"
        kind = TYPES[name.rpartition(".")[2]]
        return Response(ASSETS[name], media_type=kind, headers={"cache-control": cache})


def _add_session_pages(app: FastAPI, pages: Pages) -> None:
    @app.get("/", response_class=HTMLResponse)
    async def sessions(q: str = "", where: str = "", sort: str = "created_at", offset: Position = 0) -> str:
        return await pages.sessions(q, where, sort, offset)

    @app.get("/sessions/{session_id}", response_class=HTMLResponse)
    async def session(session_id: str, start: Start = 0) -> str:
        return await pages.session(session_id, start)

    @app.get("/sessions/{session_id}/whole", response_class=HTMLResponse)
    async def whole_session(session_id: str, start: Start = 0) -> str:
        return await pages.whole_session(session_id, start)

    @app.get("/sessions/{session_id}/turns", response_class=HTMLResponse)
    async def turns(session_id: str, start: Start = 0) -> str:
        return await pages.turns(session_id, start)

    @app.get("/sessions/{session_id}/timeline", response_class=HTMLResponse)
    async def timeline(session_id: str) -> str:
        return await pages.timeline(session_id)

    @app.get("/sessions/{session_id}/tokens")
    async def session_tokens(session_id: str) -> Response:
        return RedirectResponse(await pages.session_tokens(session_id), 303)

    @app.get("/calls/{call_id}", response_class=HTMLResponse)
    async def call(call_id: str) -> str:
        return await pages.call(call_id)

    @app.get("/calls/{call_id}/tokens")
    async def tokens(call_id: str, start: Position = 0, end: Position = 0) -> JSONResponse:
        return JSONResponse(await pages.tokens(call_id, start, end))


def _add_files(app: FastAPI, pages: Pages) -> None:
    async def saved(what: str) -> Response:
        headers = {"content-disposition": f'attachment; filename="{re.sub(r"[^A-Za-z0-9_-]", "_", what)}.html"'}
        return HTMLResponse(await one_file(pages.reader, what), headers=headers)

    @app.get("/sessions/{what}/file")
    async def session_file(what: str) -> Response:
        return await saved(what)

    @app.get("/groups/{what}/file")
    async def group_file(what: str) -> Response:
        return await saved(what)


def _add_group_pages(app: FastAPI, pages: Pages) -> None:
    @app.get("/groups", response_class=HTMLResponse)
    async def groups(policy: str = "", before: str = "") -> str:
        return await pages.groups(policy, before)

    @app.get("/groups/{group_id}", response_class=HTMLResponse)
    async def group(group_id: str) -> str:
        return await pages.group(group_id)

    @app.get("/runs", response_class=HTMLResponse)
    async def runs() -> str:
        return await pages.runs()

    @app.get("/runs/{policy}", response_class=HTMLResponse)
    async def run(policy: str) -> str:
        return await pages.run(policy)
