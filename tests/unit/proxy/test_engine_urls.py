"""What has no place in an engine's URL: a password (the URL stands in logs, errors and records), a route."""

from __future__ import annotations

import pytest

from rolltap.errors import ConfigError
from rolltap.settings import load_settings


@pytest.mark.parametrize(
    "url", ["http://user:hunter2@host:8000", "https://hunter2@host/v1", "http://a:1, http://u:hunter2@b:2"]
)
def test_a_password_in_an_engines_url_is_refused_and_not_printed(url: str) -> None:
    with pytest.raises(ConfigError, match=r"engines\.main\.url.*api_key") as refusal:
        load_settings(None, engines={"main": {"url": url}})
    assert "hunter2" not in str(refusal.value)


def test_an_at_sign_elsewhere_is_taken() -> None:
    assert load_settings(None, engines={"main": {"url": "http://host:8000/v1/@team"}}).engines["main"].url


@pytest.mark.parametrize("url", ["http://a:1/v1/chat/completions/", "http://a:1, http://b:2/v1/messages"])
def test_the_address_of_a_route_is_no_base_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"engines\.main\.url: leave out (/chat/completions|/v1/messages): "):
        load_settings(None, engines={"main": {"url": url}})
