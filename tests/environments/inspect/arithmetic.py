"""inspect_ai tasks in the package's own form: questions, and a tool loop (run in an environment that has it)."""

from inspect_ai import Task, task  # type: ignore[import-not-found]
from inspect_ai.dataset import Sample  # type: ignore[import-not-found]
from inspect_ai.scorer import includes, match, model_graded_qa  # type: ignore[import-not-found]
from inspect_ai.solver import generate, use_tools  # type: ignore[import-not-found]
from inspect_ai.tool import tool  # type: ignore[import-not-found]
from inspect_ai.util import subprocess  # type: ignore[import-not-found]

QUESTIONS = [
    Sample(id=f"{a}+{b}", input=f"What is {a} + {b}? Answer with the number.", target=str(a + b))
    for a, b in ((2, 2), (17, 25), (40, 2))
]


@task
def sums() -> Task:
    return Task(dataset=QUESTIONS, solver=[generate()], scorer=match(numeric=True))


@task
def graded() -> Task:
    return Task(dataset=QUESTIONS[:1], solver=[generate()], scorer=model_graded_qa())


@tool
def shell():  # type: ignore[no-untyped-def]
    async def execute(command: str) -> str:
        """Runs a command.

        Args:
            command: The command.
        """
        ran = await subprocess(["bash", "-c", command])
        return ran.stdout + ran.stderr

    return execute


@task
def tools() -> Task:
    return Task(dataset=QUESTIONS[:1], solver=[use_tools(shell()), generate()], scorer=includes())
