"""A plane over HTTP whose every answer is held against the OpenAPI schema of its route."""

from __future__ import annotations

from typing import Any, Literal

import aiohttp
import jsonschema

from ..harnesses.house import House


class CheckedPlane:
    """`answered` are the routes that answered with a success, and whose body was as the schema has it."""

    def __init__(self, home: House, http: aiohttp.ClientSession, plane: Literal["admin", "trainer"] = "admin") -> None:
        self._url, self._http = home.urls[plane], http
        self._headers = {"Authorization": f"Bearer {getattr(home.app.settings.keys, plane)}"}
        self.schema: dict[str, Any] = home.app.planes[plane].app.openapi()
        self.answered: set[str] = set()

    async def get(self, route: str, *, status: int = 200, **ids: Any) -> Any:
        """`ids` that are in the route's path, and its query."""
        query = [(name, value) for name, value in ids.items() if f"{{{name}}}" not in route]
        return await self._send("GET", route, status, ids, params=query)

    async def post(self, route: str, body: dict[str, Any] | None = None, *, status: int = 200, **ids: Any) -> Any:
        return await self._send("POST", route, status, ids, json=body or {})

    async def _send(self, method: str, route: str, status: int, ids: dict[str, Any], **more: Any) -> Any:
        """The decoded JSON; of anything else the bytes."""
        url = self._url + route.format(**ids)
        async with self._http.request(method, url, headers=self._headers, **more) as response:
            is_json = response.content_type == "application/json"
            endless = response.content_type == "text/event-stream"
            body = await response.json() if is_json else b"" if endless else await response.read()
            assert response.status == status, (route, body)
            self.check(f"{method} {route}", response.status, response.content_type, body)
        return body

    def check(self, row: str, status: int, content_type: str, body: Any) -> None:
        method, route = row.split(" ")
        answers = self.schema["paths"][route][method.lower()]["responses"]
        content = answers.get(str(status), answers["default"]).get("content")
        if content:
            assert content_type in content, (row, content_type)
            if content_type == "application/json":
                jsonschema.validate(body, {**content[content_type]["schema"], "components": self.schema["components"]})
        else:
            assert not body, row
        if status < 300:
            self.answered.add(row)
