"""The scripted engine's part in `test_swe.py`: every other session mends the bug, the others make it worse.

The agent is told its first commands; what it answers to them is not looked at.
"""

from __future__ import annotations

from rolltap.engine.scripted import Prompt, ScriptedReply, ToolUse

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
GOOD = "sed -i 's/a - b/a + b/' calc.py"
BAD = "sed -i 's/a - b/a * b/' calc.py; echo 'def test_add(): pass' > test_calc.py"
sessions: list[str] = []


def reply(prompt: Prompt) -> ScriptedReply:
    if prompt.session not in sessions:
        sessions.append(prompt.session)
    good = sessions.index(prompt.session) % 2 == 0
    commands = ("cat calc.py", GOOD if good else BAD, SUBMIT)
    command = commands[min(prompt.turn, len(commands) - 1)]
    return ScriptedReply(think="Let me see.", call=(ToolUse(tool="bash", arguments={"command": command}),))
