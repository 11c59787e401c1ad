"""Claude Code (npm): Anthropic Messages, streaming."""

from __future__ import annotations

import json

from rolltap.harnesses.base import Command, Endpoint, Job, Package

BUFFER_TOKENS = 13_000


def claude_environment(endpoint: Endpoint) -> dict[str, str]:
    """The environment that points Claude Code, or its agent SDK, at `endpoint` and turns off other network traffic."""
    model = endpoint.model
    return {
        **claude_window(endpoint),
        "ANTHROPIC_BASE_URL": endpoint.base_url,
        "ANTHROPIC_API_KEY": endpoint.key,
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,  # titles and other side calls
        "CLAUDE_CODE_SUBAGENT_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # else the system text changes from call to call
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "DISABLE_AUTOUPDATER": "1",
        "ENABLE_TOOL_SEARCH": "0",
        "IS_SANDBOX": "1",  # else it refuses to skip permissions as root
    }


def claude_window(endpoint: Endpoint) -> dict[str, str]:
    """The variables that make it compact when only the reserve is left; none if the context is unknown.

    It compacts at the length that it is told, less that of a reply and `BUFFER_TOKENS`. The buffer would take most of a
    small context, so it is added. If a prompt is refused nevertheless, it compacts, too.
    """
    if not endpoint.context:
        return {}
    return {
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context + BUFFER_TOKENS),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.reserve),
    }


class ClaudeCode:
    name = "claude-code"
    package = Package("npm", "@anthropic-ai/claude-code", "2.1.332", executable="claude")
    dialect = "anthropic"
    quirks = (
        "It puts system messages in mid-list, and moves its cache breakpoint, which turns block lists into strings.",
        "Invalid tool arguments come back as {'__unparsedToolInput': ...}: a history_edited break.",
        "A dropped stream leaves the partial answer and a request to go on in its history.",
        "Resumed in the middle of its work, it adds an assistant message, and lacks results that it had not noted yet.",
        "A 401 is retried as if it were a 500; a 400 is tried six times with changed bodies.",
        "Subagents' calls carry x-claude-code-agent-id and may arrive while their parent still streams.",
    )

    def launch(self, job: Job) -> Command:
        argv = ["claude", "-p", "--dangerously-skip-permissions", "--model", job.endpoint.model]
        if job.limits.turns:
            argv += ["--max-turns", str(job.limits.turns)]
        if job.resume:
            argv.append("--continue")
        return Command((*argv, job.instruction), env=claude_environment(job.endpoint))

    def converse(self, job: Job) -> Command:
        """Its file of state says that the questions of a first start have been answered."""
        argv = ["claude", "--dangerously-skip-permissions", "--model", job.endpoint.model]
        state = {
            "hasCompletedOnboarding": True,
            "bypassPermissionsModeAccepted": True,
            "customApiKeyResponses": {"approved": [job.endpoint.key[-20:]], "rejected": []},
            "projects": {str(job.workdir): {"hasTrustDialogAccepted": True}},
        }
        files = {".claude.json": json.dumps(state)}
        return Command(tuple(argv), env=claude_environment(job.endpoint), files=files, terminal=True)
