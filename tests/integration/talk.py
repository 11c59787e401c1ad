"""What the engine says in the conversation that every client holds."""

from __future__ import annotations

from rolltap.engine.scripted import Rule, Script, ScriptedReply, ToolUse


def look(place: str) -> ToolUse:
    return ToolUse("look", {"place": place})


TALK = Script(
    rules=(
        Rule(
            turns=(
                ScriptedReply(
                    think="Two places, so two looks.", say="I look at both.", call=(look("shed"), look("pond"))
                ),
                ScriptedReply(think="One is left.", call=(look("roof"),), split="odd"),
                ScriptedReply(think="That was all.", say="A frog.\nNothing else."),
                ScriptedReply(say="Goodbye."),
            )
        ),
    )
)
