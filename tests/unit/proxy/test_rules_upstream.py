"""Rules of a session whose calls an upstream renders, or whose bytes go on unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai

from rolltap.contract.rules import MaskRule, MessageRule, SessionRules
from rolltap.engine.scripted import Script, ScriptedEngine, ScriptedReply
from rolltap.engine.tiny import FOLDER
from rolltap.tokenizer import HubTokenizer

from .test_chat_mode import chat_mode_proxy
from .test_vendors import staged

RULES = SessionRules((MessageRule(text="Be brief.", call=1),), (MaskRule(call=2, pattern="Hello"),))


async def test_a_chat_upstream_gets_the_messages_at_their_places(tmp_path: Path) -> None:
    script = Script(otherwise=ScriptedReply(say="Hello."))
    async with (
        ScriptedEngine(script, FOLDER) as engine,
        chat_mode_proxy(tmp_path, engine) as (app, url),
    ):
        session, key = await app.services.sessions.open("default", rules=RULES)
        history: list[dict[str, Any]] = []
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            for turn in range(3):
                history.append({"role": "user", "content": f"turn {turn}"})
                reply = await client.chat.completions.create(model="default", messages=history)  # type: ignore[arg-type]
                history.append({"role": "assistant", "content": reply.choices[0].message.content})
        rows = await app.call_log.rows(session.id)
        assert all([each.text for each in row.intent.injected] == ["Be brief."] for row in rows)
        assert [row.intent.break_ and row.intent.break_.reason for row in rows[1:]] == ["tokens_differ"] * 2, (
            "the engine samples odd tokens"
        )
        for row in rows:
            text = HubTokenizer(FOLDER).decode(row.prompt_ids.tolist())
            assert text.count("Be brief.") == 1
            assert text.index("turn 0") < text.index("Be brief.") < (text + "Hello.").index("Hello.")
        masks = [done.masked == ((0, len(done.output_ids)),) for row in rows if (done := row.completion) is not None]
        assert masks == [False, True, False], "without the tokenizer the whole reply is masked"


async def test_a_call_whose_bytes_are_relayed_is_refused(tmp_path: Path) -> None:
    async with staged(tmp_path, "openai_chat") as stage:
        _, key = await stage.app.services.sessions.open("theirs", rules=RULES)
        answer = await stage.post(prefix=f"/s/{key}")
        assert answer.status_code == 400
        assert "put messages before its calls, and policy 'theirs' relays their bytes unchanged" in answer.text
        assert [row.completion.outcome for row in await stage.rows()] == ["refused"]
        _, masked = await stage.app.services.sessions.open("theirs", rules=SessionRules(masks=RULES.masks))
        assert (await stage.post(prefix=f"/s/{masked}")).status_code == 200
