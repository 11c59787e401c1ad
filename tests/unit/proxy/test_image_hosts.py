"""An image's URL is a request that the model server makes: none goes to a host that the settings don't name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rolltap.errors import InvalidRequest
from rolltap.protocols.conversation import ChatRequest, Image, Message
from rolltap.proxy.call.sources.chat import ChatSource
from rolltap.settings import PolicySettings

ALLOWED = "images.example.org"
DATA = "data:image/png;base64,aGk="
INWARD = [
    "http://169.254.169.254/latest/meta-data/iam",
    "http://127.0.0.1:6379/",
    "http://localhost:5432/",
    "http://[::1]:8712/sessions",
    f"http://{ALLOWED}@169.254.169.254/",
    f"http://{ALLOWED}\\@169.254.169.254/",
    f"http://169.254.169.254\\.{ALLOWED}/",
    f"http://169.254.169.254/#.{ALLOWED}",
    f"http://{ALLOWED}.evil.org/a.png",
    f"http://{ALLOWED}:80@evil.org/a.png",
    f"http://{ALLOWED}\t.evil.org/a.png",
    f" http://{ALLOWED}/a.png",
    f"http:/{ALLOWED}/a.png",
    "https://2130706433/",
    "file:///etc/passwd",
]


def check(url: str, *hosts: str, role: Any = "user", dialect: str = "openai_chat") -> None:
    settings = PolicySettings(engine="up", image_hosts=hosts)
    unused: Any = None
    ChatSource(settings, unused, unused).check(ChatRequest(dialect, "m", (Message(role, (Image(url),)),)))


@pytest.mark.parametrize("url", INWARD)
@pytest.mark.parametrize("hosts", [(), (ALLOWED,)])
def test_no_other_host_is_named_to_the_engine(url: str, hosts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match="image_hosts"):
        check(url, *hosts)


@pytest.mark.parametrize(("dialect", "field"), [("openai_responses", "input"), ("anthropic", "messages")])
def test_the_refusal_names_the_field(dialect: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check(INWARD[0], dialect=dialect, role="tool")
    assert refusal.value.param == field


@pytest.mark.parametrize("url", [f"https://{ALLOWED}/a.png?size=1", f"http://{ALLOWED.upper()}:8080/a%20b.png"])
def test_a_host_of_the_settings_is_let_through(url: str) -> None:
    check(url, ALLOWED)
    with pytest.raises(InvalidRequest):
        check(url)


@pytest.mark.parametrize("spell", [str, str.upper])
def test_a_data_url_is_let_through(spell: Callable[[str], str]) -> None:
    check(spell("data:") + DATA.removeprefix("data:"))
