"""Every token that ends a family's replies ends one without a trace in its text."""

from __future__ import annotations

import pytest

from rolltap.engine.scripted import ScriptedReply
from rolltap.protocols.conversation import Message, Text
from rolltap.proxy.continuation.parser import ReplyParser

from .families import FAMILIES
from .fitting_table import renderer_of
from .test_fitting import QUICK
from .vocabularies import model_folder
from .writing import FamilyReplyWriter


@pytest.mark.parametrize("name", [name for name in QUICK if FAMILIES[name].reads])
def test_no_end_is_text(name: str) -> None:
    family = FAMILIES[name]
    renderer, writer = renderer_of(family), FamilyReplyWriter(family, model_folder(family, "tiny"))
    prompt = renderer.render([Message("user", (Text("go"),))], (), thinking=False)
    *said, _ = writer.write(ScriptedReply(say="It is done."), prompt)

    def read(*ids: int) -> tuple[str, bool]:
        parser = ReplyParser(renderer, prompt, (), (), lambda at: "unused")
        parser.feed([*said, *ids])
        _, choice = parser.finish("stop")
        return choice.message.text.strip(), parser.unparsable

    for end in renderer.stop_token_ids:
        assert read(end) == read(), renderer.tokenizer.token(end)
