"""What the vendors' own clients ask for beside plain turns, and a proxy that is started anew between two turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio
from google import genai
from google.genai import errors as genai_errors
from google.genai import types as genai_types
from pydantic import BaseModel

from rolltap.engine.scripted import Rule, Script, ScriptedEngine, ScriptedReply
from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.client import OpenedSession

from ..harnesses.house import House, Run, house, opened
from .sdk_conversations import MAX_TOKENS, Anthropic, Conversation, Gemini, OpenAIChat, OpenAIResponses
from .sdk_conversations import OpenAIResponsesById as ById
from .talk import TALK

pytestmark = pytest.mark.asyncio(loop_scope="module")

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SCRIPT = Script(
    rules=(
        Rule(
            when="As JSON",
            turns=(ScriptedReply(say='{"place": "pond", "frogs": 1}'),),
            afterwards=ScriptedReply(say="{}"),
        ),
        Rule(when="Count.", turns=(ScriptedReply(say="one two three four five six"),)),
        Rule(when="Wait.", turns=(ScriptedReply(say="Now.", hold=1),)),
    ),
    otherwise=ScriptedReply(say="Hello."),
)


class Sighting(BaseModel):
    place: str
    frogs: int


class Clients:
    """The vendors' clients on a session of their own."""

    def __init__(self, home: House, session: OpenedSession) -> None:
        self.home = home
        self.session = session
        self.model = session.endpoint.model
        key, url = session.endpoint.key, session.endpoint.base_url
        self.openai = openai.AsyncOpenAI(api_key=key, base_url=f"{url}/v1", max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(api_key=key, base_url=url, max_retries=0)
        self.http = httpx.AsyncClient()
        options = genai_types.HttpOptions(base_url=url, httpx_async_client=self.http)
        self.genai = genai.Client(api_key=key, http_options=options)

    async def close(self) -> None:
        await self.openai.close()
        await self.anthropic.close()
        await self.genai.aio.aclose()
        self.genai.close()
        await self.http.aclose()

    async def chat(self, content: Any, **more: Any) -> Any:
        messages: Any = [{"role": "user", "content": content}]
        return await self.openai.chat.completions.create(model=self.model, messages=messages, **more)

    async def responses(self, content: Any, **more: Any) -> Any:
        return await self.openai.responses.create(
            model=self.model, input=[{"role": "user", "content": content}], **more
        )

    async def messages(self, content: Any, **more: Any) -> Any:
        messages: Any = [{"role": "user", "content": content}]
        return await self.anthropic.messages.create(model=self.model, max_tokens=MAX_TOKENS, messages=messages, **more)

    async def gemini(self, content: Any, **more: Any) -> Any:
        config = genai_types.GenerateContentConfig(**more)
        return await self.genai.aio.models.generate_content(model=self.model, contents=content, config=config)

    async def sent(self) -> list[dict[str, Any]]:
        """The sampling that the engine was asked for, by call."""
        rows = await self.home.app.call_log.rows(self.session.session_id)
        return [dict(row.intent.sampling_sent) for row in rows]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def home(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with house(SCRIPT, tmp_path_factory.mktemp("house"), limits={"calls_at_once": 1}) as home:
        yield home


@pytest_asyncio.fixture(loop_scope="module")
async def clients(home: House) -> AsyncIterator[Clients]:
    clients = Clients(home, await home.open())
    yield clients
    await clients.close()


async def test_images_are_refused_by_a_model_that_takes_none(clients: Clients) -> None:
    url = f"data:image/png;base64,{PIXEL}"
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    with pytest.raises(openai.BadRequestError, match="does not accept images"):
        await clients.chat([{"type": "image_url", "image_url": {"url": url}}])
    with pytest.raises(openai.BadRequestError, match="does not accept images"):
        await clients.responses([{"type": "input_image", "image_url": url, "detail": "auto"}])
    with pytest.raises(anthropic.BadRequestError, match="does not accept images"):
        await clients.messages([{"type": "image", "source": source}])
    with pytest.raises(genai_errors.ClientError, match="does not accept images"):
        await clients.gemini(genai_types.Part.from_bytes(data=b"GIF89a", mime_type="image/gif"))


async def test_structured_output_reaches_the_engine_and_is_parsed(clients: Clients) -> None:
    asked: Any = [{"role": "user", "content": "As JSON, please."}]
    sighting = Sighting(place="pond", frogs=1)
    chat = await clients.openai.chat.completions.parse(model=clients.model, messages=asked, response_format=Sighting)
    assert chat.choices[0].message.parsed == sighting
    response = await clients.openai.responses.parse(model=clients.model, input=asked, text_format=Sighting)
    assert response.output_parsed == sighting
    message = await clients.anthropic.messages.parse(
        model=clients.model, max_tokens=MAX_TOKENS, messages=asked, output_format=Sighting
    )
    assert message.parsed_output == sighting
    schema = Sighting.model_json_schema()
    reply = await clients.gemini("As JSON, please.", response_mime_type="application/json", response_json_schema=schema)
    assert Sighting.model_validate_json(reply.text) == sighting
    for sent in await clients.sent():
        assert sent["json_schema"]["properties"].keys() == schema["properties"].keys()
        assert sent["json_schema"]["required"] == ["place", "frogs"]


async def test_several_choices_are_several_samples(clients: Clients) -> None:
    chat = await clients.chat("Count.", n=2)
    assert [choice.index for choice in chat.choices] == [0, 1]
    reply = await clients.gemini("Count.", candidate_count=2)
    assert len(reply.candidates) == 2
    shown = await clients.home.read(Run(clients.session))
    assert len(shown.asked) == 4
    assert [call["outcome"] for call in shown.calls] == ["completed"] * 4


async def test_a_stop_string_ends_the_reply(clients: Clients) -> None:
    chat = await clients.chat("Count.", stop=" four")
    message = await clients.messages("Count.", stop_sequences=[" four"])
    reply = await clients.gemini("Count.", stop_sequences=[" four"])
    assert chat.choices[0].finish_reason == "stop"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " four")
    assert [chat.choices[0].message.content, message.content[0].text, reply.text] == ["one two three"] * 3


async def test_a_seed_is_taken_and_a_trained_policy_is_sampled_without(clients: Clients) -> None:
    await clients.chat("Count.", seed=7)
    await clients.gemini("Count.", seed=7)
    rows = await clients.home.app.call_log.rows(clients.session.session_id)
    assert [row.intent.sampling_asked["seed"] for row in rows] == [7, 7]
    assert [sent["seed"] for sent in await clients.sent()] == [None, None]


async def test_log_probs_are_those_that_are_recorded(clients: Clients) -> None:
    chat = await clients.chat("Count.", logprobs=True)
    response = await clients.responses("Count.", include=["message.output_text.logprobs"])
    reply = await clients.gemini("Count.", response_logprobs=True)
    told = [
        [entry.logprob for entry in chat.choices[0].logprobs.content],
        [entry.logprob for entry in response.output[-1].content[0].logprobs],
        [entry.log_probability for entry in reply.candidates[0].logprobs_result.chosen_candidates],
    ]
    rows = await clients.home.app.call_log.rows(clients.session.session_id)
    recorded = [row.call().logprobs.tolist() for row in rows]
    assert [entries == pytest.approx(kept) for entries, kept in zip(told, recorded, strict=True)] == [True] * 3


async def test_a_field_that_is_not_supported_is_the_clients_error_400(clients: Clients) -> None:
    with pytest.raises(openai.BadRequestError) as chat:
        await clients.chat("Hello?", logit_bias={"5": 1})
    assert chat.value.param == "logit_bias"
    with pytest.raises(openai.BadRequestError) as response:
        await clients.responses("Hello?", truncation="auto")
    assert response.value.param == "truncation"
    with pytest.raises(anthropic.BadRequestError, match="container"):
        await clients.messages("Hello?", extra_body={"container": "c"})
    with pytest.raises(genai_errors.ClientError, match="cachedContent") as gemini:
        await clients.gemini("Hello?", cached_content="cachedContents/1")
    assert gemini.value.code == 400


async def test_a_closed_session_is_a_conflict(clients: Clients) -> None:
    await clients.home.client.close_session(clients.session.session_id)
    with pytest.raises(openai.ConflictError):
        await clients.chat("Hello?")
    with pytest.raises(openai.ConflictError):
        await clients.responses("Hello?")
    with pytest.raises(anthropic.ConflictError):
        await clients.messages("Hello?")
    with pytest.raises(genai_errors.ClientError) as gemini:
        await clients.gemini("Hello?")
    assert gemini.value.code == 409


async def test_too_many_calls_at_once_are_a_rate_limit(clients: Clients) -> None:
    first = asyncio.create_task(clients.chat("Wait."))
    session_id = clients.session.session_id
    await clients.home.engine.journal.until(lambda entries: any(e.session == session_id for e in entries))
    with pytest.raises(openai.RateLimitError) as chat:
        await clients.chat("Hello?")
    assert int(chat.value.response.headers["retry-after"]) >= 1
    with pytest.raises(openai.RateLimitError):
        await clients.responses("Hello?")
    with pytest.raises(anthropic.RateLimitError):
        await clients.messages("Hello?")
    with pytest.raises(genai_errors.ClientError) as gemini:
        await clients.gemini("Hello?")
    assert gemini.value.code == 429
    clients.home.engine.release()
    assert (await first).choices[0].message.content == "Now."
    clients.home.engine.hold()


async def test_a_response_is_retrieved_as_it_was_given(clients: Clients) -> None:
    given = await clients.responses("Count.")
    assert await clients.openai.responses.retrieve(given.id) == given
    with pytest.raises(openai.NotFoundError):
        await clients.openai.responses.retrieve("resp_unknown")


@pytest.mark.parametrize(
    "client", [OpenAIChat, OpenAIResponses, ById, Anthropic, Gemini], ids=lambda client: client.__name__
)
async def test_a_restart_between_turns_is_not_noticed(client: type[Conversation], tmp_path: Path) -> None:
    """The same database, the same address, the same client object: the line goes on."""
    async with ScriptedEngine(TALK, FOLDER) as engine, AsyncExitStack() as closing:
        async with opened(engine, tmp_path, history_thinking="keep") as home:
            session = await home.open()
            port = int(home.urls["agent"].rpartition(":")[2])
            talk = client(session.endpoint, closing, stream=True)
            await talk.say("Where is the frog?")
            await talk.answer("tools", "water")
        async with opened(engine, tmp_path, port=port, history_thinking="keep") as home:
            await talk.answer("a frog")
            assert (await talk.say("Thank you.")).text == "Goodbye."
            run = await home.read(Run(session))
        assert [entry.extends for entry in run.asked] == [None, True, True, True]
        assert [call["break_"] for call in run.calls] == [None] * 4
        assert run.report["segments"] == 1
