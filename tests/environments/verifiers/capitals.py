"""A verifiers taskset of one question a task, in the package's own form (run in an environment that has it)."""

import verifiers.v1 as vf  # type: ignore[import-not-found]

__all__ = ["CapitalsTaskset"]
CAPITALS = {"France": "Paris", "Peru": "Lima", "Kenya": "Nairobi"}


class CapitalData(vf.TaskData):
    answer: str


class CapitalTask(vf.Task[CapitalData]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)


class CapitalsTaskset(vf.Taskset[CapitalTask, vf.TasksetConfig]):
    def load(self):  # type: ignore[no-untyped-def]
        for country, capital in CAPITALS.items():
            prompt = f"What is the capital of {country}?"
            yield CapitalTask(CapitalData(name=country, prompt=prompt, answer=capital), self.config.task)
