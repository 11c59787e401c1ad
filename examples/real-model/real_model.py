"""A pretrained language model on two cores: recorded, fine-tuned by TRL, then trained by GRPO.

    python real_model.py OUT                    stages that OUT/results.json has are not run again
    python real_model.py OUT --stages record sft

Stages: `zero` measures the model as it is. `record` has a teacher drive mini-swe-agent through the proxy, which records
it. `sft` exports the episodes and fine-tunes the model on them with TRL: on the right ones of a teacher that never
errs, and on all of one that does. `tools` does both for a second agent, with native tool calls. `grpo` trains from the
second model of `sft` by `rolltap train`; `control` does the same with shuffled rewards. Only by `--stages`, from the
same start: `seed-1` and `seed-2`, `rloo` (another recipe) and `trl` (TRL's `GRPOTrainer`). Success is on tasks whose
file names no training task has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fetch import fetch
from world import TASKS, tool_tasks

from rolltap.cli.demo import prepare_folder
from rolltap.demo.learn import POLICIES, POLICY, AgentTasks, DemoRecipe, SeedRunner, ShuffledRewards, StartTrainer
from rolltap.demo.stack import Process, Stack
from rolltap.engine.tiny.tasks import make_tasks
from rolltap.harnesses.client import AdminClient

HERE = Path(__file__).parent
STAGES = ("zero", "record", "sft", "tools", "grpo", "control")
MORE = ("seed-1", "seed-2", "rloo", "trl")
"""As long as `grpo` each."""

TEACHERS = {"right": 0.0, "errs": 0.4}
"""Share of wrong commands. The first one's pupil is a result by itself, the second one's is where GRPO starts."""
TEACHER = "teacher"
ENGINE = ("--context", "1024", "--slots", "64")
PINNED = {name: {**options, "pin": {**options["pin"], "max_tokens": 64}} for name, options in POLICIES.items()}
"""For an agent that has no limit of its own."""


@dataclass(frozen=True)
class Sizes:
    """How much is done. `episodes`: those of each teacher, in the order of `TEACHERS`; `tool_episodes` of `tools`."""

    episodes: tuple[int, int] = (192, 128)
    tool_episodes: int = 128
    held_out: int = 128
    steps: int = 40
    groups: int = 8
    rollouts: int = 8
    batch: int = 8
    sft_lr: float = 1e-4


KEPT = (
    "step",
    "version",
    "reward",
    "groups_without_variance",
    "trained_tokens",
    "entropy",
    "mismatch_mean",
    "grad_norm",
    "seconds",
)
"""What `results.json` has of a step; all of it is in the stage's `train/metrics.jsonl`."""

SMALL = Sizes(episodes=(8, 8), tool_episodes=8, held_out=4, steps=2, groups=2, rollouts=4, batch=2)
"""For a test of the script."""


def grpo(sizes: Sizes, recipe: str = "grpo") -> DemoRecipe:
    return DemoRecipe(
        recipe=recipe, steps=sizes.steps, groups=sizes.groups, rollouts=sizes.rollouts, lr=3e-5, lr_end=1.0, epochs=1,
        kl=0.0, clip_high=0.3, held_out=sizes.held_out, warm_up=3, dtype="bfloat16",
    )  # fmt: skip


@dataclass(eq=False)
class TeacherStack(Stack):
    """The proxy before a scripted engine that knows the commands, with the model's own tokenizer."""

    errs: float = 0.0
    kind: str = "vllm"
    policies: dict[str, dict[str, object]] = field(default_factory=lambda: {TEACHER: {"pin": {"temperature": 1.0}}})

    def start_engine(self, name: str) -> Process:
        command = [sys.executable, str(HERE / "world.py"), str(self.model), str(self.ports[name])]
        engine = Process.start(name, command, self.folder, {"TEACHER_ERRS": str(self.errs)})
        self.processes.append(engine)
        return engine


def note(part: str, done: int, text: str) -> None:
    if done % 8 == 0:
        print(f"  {part} {done}: {text}", flush=True)


def start_trl(stack: Stack, recipe: DemoRecipe, seed: int) -> Process:
    """TRL's trainer in place of ours."""
    given = (stack.trainer_url, POLICY, stack.model, stack.folder / "train", recipe.steps, recipe.groups, recipe.lr)
    command = [sys.executable, str(HERE / "with_trl.py"), *map(str, given)]
    env = {"ROLLTAP_TRAINER_KEY": stack.keys["trainer"], "OMP_NUM_THREADS": "1"}
    trainer = Process.start("trainer", command, stack.folder, env)
    stack.processes.append(trainer)
    return trainer


@dataclass
class RealModel:
    """The stages over one folder."""

    out: Path
    model: Path
    sizes: Sizes

    @property
    def stages(self) -> dict[str, Callable[[], dict[str, Any]]]:
        return {
            "zero": lambda: self._measured(self.model, "zero"),
            "record": self.record,
            "sft": self.sft,
            "tools": self.tools,
            "grpo": lambda: self._trained("grpo"),
            "control": lambda: self._trained("control", shuffled=ShuffledRewards(0)),
            "seed-1": lambda: self._trained("seed-1", seed=1),
            "seed-2": lambda: self._trained("seed-2", seed=2),
            "rloo": lambda: self._trained("rloo", recipe="rloo"),
            "trl": lambda: self._trained("trl", trainer=start_trl),
        }

    def record(self) -> dict[str, Any]:
        return {
            name: self._record(name, self.model, episodes, errs)
            for (name, errs), episodes in zip(TEACHERS.items(), self.sizes.episodes, strict=True)
        }

    def sft(self) -> dict[str, Any]:
        return {
            "right": self._pupil("right", self.model, ["--where", "reward>=1"]),
            "errs": self._pupil("errs", self.model, []),
        }

    def tools(self) -> dict[str, Any]:
        model = self.out / "smollm2-tools"
        shutil.copytree(self.model, model, dirs_exist_ok=True)
        shutil.copy(HERE / "tools.jinja", model / "chat_template.jinja")
        tasks = tool_tasks(self.out / "workspaces")
        recorded = self._record("tools", model, self.sizes.tool_episodes, 0.0, tasks)
        return {"record": recorded, **self._pupil("tools", model, ["--where", "reward>=1"], tasks)}

    def _record(self, name: str, model: Path, episodes: int, errs: float, tasks: AgentTasks = TASKS) -> dict[str, Any]:
        folder = self._folder(f"record-{name}")
        with TeacherStack(folder, model, family="", errs=errs) as stack:
            runner = SeedRunner(stack, grpo(self.sizes), 0, None, note, tasks)
            episode_tasks = make_tasks(0, episodes, "train", tasks.kinds)

            async def play() -> dict[str, list[float]]:
                async with AdminClient(stack.admin_url, stack.keys["admin"]) as client:
                    return await runner.play(client, episode_tasks, TEACHER, f"record {name}")

            return rates(asyncio.run(play()))

    def _pupil(self, name: str, model: Path, where: list[str], tasks: AgentTasks = TASKS) -> dict[str, Any]:
        """Fine-tunes `model` on the export of a record, and measures what became of it."""
        data = self.out / f"data-{name}"
        shutil.rmtree(data, ignore_errors=True)
        store = self.out / f"record-{name}" / "data" / "rolltap.db"
        command = ["export", str(data), "--store", f"sqlite:///{store}", "--format", "sft-tokens", *where]
        subprocess.run([sys.executable, "-m", "rolltap", *command], check=True)
        # In a process of its own, whose gigabytes are free again while the next stages run.
        with ProcessPoolExecutor(1, get_context("spawn")) as worker:
            seconds = worker.submit(fine_tune, model, data, self.out / f"sft-{name}", self.sizes).result()
        return {"seconds": seconds, **self._measured(self.out / f"sft-{name}", f"sft-{name}", tasks)}

    def _measured(self, model: Path, name: str, tasks: AgentTasks = TASKS) -> dict[str, Any]:
        folder = self._folder(f"measured-{name}")
        policies = POLICIES if tasks is TASKS else PINNED
        with Stack(folder, model, policies, family="", engine_options=ENGINE) as stack:
            runner = SeedRunner(stack, grpo(self.sizes), 0, None, note, tasks)

            async def play() -> dict[str, list[float]]:
                async with AdminClient(stack.admin_url, stack.keys["admin"]) as client:
                    return await runner.measure(client, name)

            return rates(asyncio.run(play()))

    def _trained(
        self, name: str, *, seed: int = 0, recipe: str = "grpo", shuffled: ShuffledRewards | None = None,
        trainer: StartTrainer | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        folder = self._folder(name)
        with Stack(folder, self.out / "sft-errs", POLICIES, family="", engine_options=ENGINE) as stack:
            runner = SeedRunner(stack, grpo(self.sizes, recipe), seed, shuffled, note, TASKS, trainer)
            result = asdict(asyncio.run(runner.run()))
        return {**result, "steps": [{key: step[key] for key in KEPT if key in step} for step in result["steps"]]}

    def _folder(self, name: str) -> Path:
        folder = self.out / name
        prepare_folder(folder)
        return folder.absolute()


def rates(by_kind: dict[str, list[float]]) -> dict[str, Any]:
    everything = [reward for rewards in by_kind.values() for reward in rewards]
    kinds = {kind: sum(rewards) / len(rewards) for kind, rewards in sorted(by_kind.items())}
    return {"success": sum(everything) / len(everything), "tasks": len(everything), "kinds": kinds}


def figures(result: dict[str, Any], before: str = "") -> Iterator[str]:
    """The numbers of a stage, without those by kind."""
    for name, value in result.items():
        if isinstance(value, dict) and name != "kinds":
            yield from figures(value, f"{name} ")
        elif isinstance(value, (int, float)):
            yield f"{before}{name} {value:g}"


def fine_tune(model: Path, data: Path, out: Path, sizes: Sizes) -> float:
    """One epoch on the recorded tokens by TRL; the seconds that it took."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = load_dataset("parquet", data_files=str(data / "train-*.parquet"), split="train")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = SFTConfig(
        str(out),
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        per_device_train_batch_size=sizes.batch,
        learning_rate=sizes.sft_lr,
        warmup_steps=4,
        num_train_epochs=1,
        bf16=True,
        use_cpu=True,
        logging_steps=2,
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=False,
        seed=0,
    )
    started = time.monotonic()
    trainer = SFTTrainer(
        model=network, args=settings, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(model)
    )
    trainer.train()
    seconds = time.monotonic() - started
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("model.safetensors"), dirs_exist_ok=True)
    network.float().save_pretrained(out)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: SmolLM2, fetched")
    parser.add_argument("--stages", nargs="+", choices=(*STAGES, *MORE), default=STAGES)
    parser.add_argument("--small", action="store_true", help="a few tasks and steps: a test of this script")
    parser.add_argument("--steps", type=int, help="of GRPO")
    given = parser.parse_args()
    out: Path = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    sizes = SMALL if given.small else Sizes()
    sizes = replace(sizes, steps=given.steps or sizes.steps)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run = RealModel(out, given.model or fetch(out / "smollm2"), sizes)
    path = out / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"sizes": asdict(sizes)}
    machine = f"({os.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}.)"
    results.setdefault("machine", machine)
    for stage, perform in run.stages.items():
        if stage in given.stages and stage not in results:
            print(stage, flush=True)
            started = time.monotonic()
            results[stage] = perform()
            results[stage]["stage_seconds"] = round(time.monotonic() - started)
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for stage in run.stages:
        if stage in results:
            print(stage, ", ".join(figures(results[stage])))


if __name__ == "__main__":
    main()
