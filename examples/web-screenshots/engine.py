"""What the scripted engine says in place of a model that sees: every other attempt presses the wrong button.

Its replies come in tokens that the tokenizer would not choose: they are recorded as they were sampled.
"""

from rolltap.engine.scripted import Prompt, ScriptedReply

RIGHT, WRONG = ("click 160 165", "answer 4711"), ("click 160 95", "answer 9034")
attempts: list[str] = []


def reply(prompt: Prompt) -> ScriptedReply:
    if prompt.session not in attempts:
        attempts.append(prompt.session)
    said = (RIGHT, WRONG)[attempts.index(prompt.session) % 2]
    return ScriptedReply(say=said[min(prompt.turn, 1)], split="odd")
