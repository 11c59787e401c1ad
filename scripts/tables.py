"""Writes the tables of README.md and docs/ from reports/*.json, between their markers."""

from __future__ import annotations

# ruff: noqa: E501
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolltap.cli.demo import plot, share

ROOT = Path(__file__).parents[1]


def demo(report: dict[str, Any]) -> str:
    rows = "\n".join(
        f"| {run['seed']} | {share(run['success_before'], run['held_out'])} | {share(run['success_after'], run['held_out'])} "
        f"| {len(run['steps'])} | {run['cpu_seconds']:.0f} |"
        for run in report["runs"]
    )
    kept = report["kept_tokens"] / report["sampled_tokens"]
    breaks = ", ".join(f"{name} {count}" for name, count in report["breaks"].items()) or "none"
    plot({run["seed"]: run["curve"] for run in report["runs"]}, report["runs"], ROOT / "docs" / "demo.png")
    return (
        "mini-swe-agent from PyPI, unmodified, on small file-system tasks; a 0.8 M-parameter model on the embedded engine; "
        "the trainer is a process of its own. Success on held-out tasks, before and after "
        f"(sampled at temperature {report['held_out_temperature']:g}):\n\n"
        "| seed | before (95% interval) | after | training steps | CPU seconds |\n|---|---|---|---|---|\n"
        f"{rows}\n\n"
        f"{report['calls']:,} calls, {report['sampled_tokens']:,} sampled tokens of which {kept:.1%} are trained on, in "
        f"{report['rows']:,} rows; breaks: {breaks}; weight versions 0 to {report['weight_versions']} on the tokens. "
        f"({report['cores']} cores, Python {report['python']}, {report['time'][:10]}.)\n\n"
        "![success by training step](docs/demo.png)"
    )


def fidelity(report: dict[str, Any]) -> str:
    rows = "\n".join(
        f"| {row['family']} | {row['by']} | {row['unaltered']} | {row['bridged']} | {row['rerendered_exact']} | {row['violations']} | "
        + (", ".join(f"{name} {count}" for name, count in row["breaks"].items()) or "none")
        + " |"
        for row in report["rows"]
    )
    return (
        "| model | bridged by | turns resent unaltered | bridged | exact by plain re-rendering | invariant violations | breaks |\n"
        f"|---|---|---|---|---|---|---|\n{rows}"
    )


def demo_record(report: dict[str, Any]) -> str:
    """The reconstruction report of the demo's run."""
    kept = report["kept_tokens"] / report["sampled_tokens"]
    merged = report["merges"] / report["calls"]
    breaks = ", ".join(f"{name} {count}" for name, count in report["breaks"].items()) or "none"
    return (
        "| calls | sampled tokens | kept | rows | calls merged into an earlier one's row | breaks |\n|---|---|---|---|---|---|\n"
        f"| {report['calls']:,} | {report['sampled_tokens']:,} | {kept:.1%} | {report['rows']:,} | {merged:.0%} | {breaks} |"
    )


def bench_reconstruct(report: dict[str, Any]) -> str:
    rows = "\n".join(
        f"| {one['name']} | {one['calls']:,} | {one['tokens']:,} | {1e3 * one['seconds']:.1f} | {one['tokens_per_s'] / 1e6:.1f} | {one['goal']} |"
        for one in report["figures"]
    )
    log = report["log"]
    return (
        "| session | calls | tokens of its rows | ms | million tokens/s | goal |\n|---|---|---|---|---|---|\n"
        f"{rows}\n\n"
        f"A log of {log['calls']:,} calls into Parquet: {log['seconds']:.0f} s, peak {log['peak_mb_half_way']} MB half way "
        f"and {log['peak_mb_at_the_end']} MB at the end. "
        f"(One core, Python {report['python']}, {report['time'][:10]}.)"
    )


def faults(report: dict[str, Any]) -> str:
    rows, points = "", ", ".join(f"`{name}` {count}" for name, count in report["points"].items())
    for one in report["rows"]:
        recovery = one["recovery_s"]
        times = f"{recovery['median']:.1f} / {recovery['max']:.1f}" if recovery else ""
        rows += f"| {one['row']} | {one['fault']} | {one['runs']} | {one['checks']} | {len(one['violations'])} | {times} |\n"
    return (
        "| # | fault | runs | checks | violations | recovery s, median / worst |\n|---|---|---|---|---|---|\n"
        f"{rows}\n"
        f"{sum(one['runs'] for one in report['rows'])} runs: {report['seeds']} seeds, {report['whole_seeds']} of them with every scenario; "
        f"{report['kills']} kills in row 5's loops; {report['seconds'] / 60:.0f} minutes. "
        f"Where the proxy died in row 5: {points}. "
        f"({report['cores']} cores, Python {report['python']}, SQLite {report['sqlite']}, {report['time'][:10]}.)"
    )


def rollouts(report: dict[str, Any]) -> str:
    rows = "".join(
        f"| {name} | {report[name]['per_minute']:,.0f} | {report['goals'][name]} | {report[name]['runner_cpu_ms']:.1f} ms |\n"
        for name in ("process", "bubblewrap")
    )
    return (
        "| runtime | rollouts a minute | goal | runner's own CPU a rollout |\n|---|---|---|---|\n"
        f"{rows}\n"
        f"Run slots are busy {report['busy']:.0%} of the time while evaluations take as long as the agents (goal "
        f"{report['goals']['busy']:.0%}; one stage for both gives about 50%). An idle `rolltap node` takes "
        f"{report['idle_mb']:.0f} MB. ({report['cores']} cores at a load of {report['load'][0]:.0f}, Python "
        f"{report['python']}, {report['time'][:10]}.)"
    )


def ray_kill(report: dict[str, Any]) -> str:
    states = ", ".join(f"{count:,} {name}" for name, count in report["states"].items())
    return (
        "| rollouts | nodes killed | ended as | ended once | ended twice | attempts | claims that came back | sessions left open |\n"
        "|---|---|---|---|---|---|---|---|\n"
        f"| {report['rollouts']:,} | {report['nodes_killed']} | {states} | {report['ended_once']:,} | {report['ended_twice']} | "
        f"{report['attempts']:,} | {report['returned']} | {report['open_sessions']} |\n\n"
        f"In {report['seconds']:.0f} s. ({report['cores']} cores, Ray {report['ray']}, Python {report['python']}, {report['time'][:10]}.)"
    )


def bench_calllog(report: dict[str, Any]) -> str:
    size, restart, speed = (report[name] for name in ("size", "restart", "speed"))
    goals = report["goals"]
    rows = "\n".join(
        f"| {one['store']} | {one['clients']} | {one['calls_per_s']:,.0f} | {one['p50_ms']:.1f} / {one['p99_ms']:.1f} | {one['cpu_us_per_call']:.0f} |"
        for one in speed
    )
    return (
        "| | measured | goal |\n|---|---|---|\n"
        f"| {size['turns']} turns, {size['tokens']:,} tokens: raw JSON / stored, kB | {size['json_bytes'] / 1e3:,.0f} / {size['stored_bytes'] / 1e3:,.0f} = {size['times_smaller']:.0f} times smaller | {goals['times_smaller']} |\n"
        f"| restart on {restart['calls']:,} recorded calls: ready after, s | {restart['restart_s']:.2f} | {goals['restart_s']:g} |\n"
        f"| session by key among {restart['sessions']:,}, p50 / p99, ms | {restart['lookup_p50_ms']:.2f} / {restart['lookup_p99_ms']:.2f} | {goals['lookup_ms']:g} |\n"
        f"| SQLite alone, best, calls/s of 1,000 tokens | {max(one['calls_per_s'] for one in speed if one['store'] == 'sqlite'):,.0f} | {goals['calls_per_s_sqlite']:,} |\n\n"
        "The log alone, calls of 700 new and 300 sampled tokens; the time is a call's wait for both of its rows:\n\n"
        "| store | at once | calls/s | p50 / p99 ms | CPU µs a call |\n|---|---|---|---|---|\n"
        f"{rows}\n\n{_machine(report)}"
    )


def bench_proxy(report: dict[str, Any]) -> str:
    rows = "\n".join(f"| {one['name']} | {one['value']:,.2f} | {one['goal']} |" for one in report["measures"])
    growth = report["growth"]
    return (
        "| measure | figure | goal |\n|---|---|---|\n"
        f"{rows}\n"
        f"| growth of RSS over {growth['calls']:,} calls, MB | {growth['growth_mb']:.1f} | ≤ 5 |\n\n"
        f"Medians of {report['rounds']} rounds; the tokenizer is `{report['tokenizer']}`'s.\n\n{_machine(report)}"
    )


def trainers(report: dict[str, Any]) -> str:
    """Each trainer beside ours: what it learned, and what its steps cost."""
    names = {"ours": "`rolltap train`", "trl-grpo": "TRL `GRPOTrainer`", "trl-async": "TRL `AsyncGRPOTrainer`"}
    own = next(one["cpu_ms_per_1000"] for one in report["rows"] if one["trainer"] == "ours")
    rows = "\n".join(
        f"| {names[one['trainer']]} | {share(one['before'], report['held_out'] * one['runs'])} | {share(one['after'], report['held_out'] * one['runs'])} "
        f"| {one['steps']} | {one['seconds']:.0f} | {one['trained_tokens']:,} | {one['cpu_ms_per_1000']:.0f} | {one['cpu_ms_per_1000'] / own:.2f} |"
        for one in report["rows"]
    )
    return (
        "| trainer | before (95% interval) | after | steps | seconds | trained tokens | CPU ms per 1,000 | over ours |\n|---|---|---|---|---|---|---|---|\n"
        f"{rows}\n\n"
        f"The demo's tasks and its 0.8 M-parameter model, {report['groups']} groups of {report['rollouts']} rollouts a step, {report['held_out']} "
        f"held-out tasks at temperature {report['temperature']:g}, the same clip bounds, optimiser and learning rate, one thread. Processor time is "
        "the trainer process's in its steps (lease, loss, gradient, push), a median over steps; seconds are mostly the agents'. "
        f"({report['cores']} cores, TRL {report['trl']}, Python {report['python']}, {report['time']}.)"
    )


SEEN = ("paint_s", "key_s")


def bench_viewer(report: dict[str, Any]) -> str:
    rows = "\n".join(
        f"| {name} | {1e3 * page['median_s']:,.0f} | {1e3 * page['worst_s']:,.0f} | {page['kilobytes']:,.0f} | "
        + " | ".join(f"{1e3 * report['browser'][name][key]:,.0f}" if name in report["browser"] else "" for key in SEEN)
        + " |"
        for name, page in report["pages"].items()
    )
    return (
        "| page | median, ms | worst, ms | kB | first paint, ms | a key, ms |\n|---|---|---|---|---|---|\n"
        f"{rows}\n\nThe index of the {report['sessions']:,} sessions and their words, once: {report['index_s']:,.0f} s.\n\n{_machine(report)}"
    )


def bench_scale(report: dict[str, Any]) -> str:
    turns, workers = report["turns"], report["workers"]
    cpu_ms = "".join(
        f"| {name} | {turns[name]['early_ms']:.2f} | {turns[name]['late_ms']:.2f} |\n"
        for name in ("bare forwarder", "rolltap")
    )
    stores = "".join(
        f"| {one['proxies']} | {one['streams']:,} | {one['calls_per_s']:,.0f} | {one['p50_ms']:,.0f} / {one['p99_ms']:,.0f} "
        f"| {one['log_cpu_ms']:.2f} | {one['postgres_cpu_ms']:.2f} |\n"
        for one in report.get("store", [])
    )
    table = (
        f"| CPU ms a call | turn 10 | turn 2,000 |\n|---|---|---|\n{cpu_ms}\n"
        f"Without the forwarder's part, turn 2,000 costs {turns['ratio']:.1f} times turn 10 (goal 1.5). "
        f"A call costs {workers['cpu_ms']['1']:.2f} ms with one worker on Postgres and {workers['cpu_ms']['2']:.2f} ms with two: "
        f"{workers['ratio']:.2f} times (goal 1.10).\n"
    )
    if stores:
        table += (
            "\n| proxies on one Postgres | replies under way | calls/s that arrive | wait for both rows, p50 / p99 ms "
            "| CPU ms a call: log | CPU ms a call: Postgres |\n|---|---|---|---|---|---|\n" + stores
        )
    return f"{table}\n{_machine(report)}"


def _machine(report: dict[str, Any]) -> str:
    day = time.strftime("%Y-%m-%d", time.gmtime(report["time"]))
    return (
        f"({report['cores']} cores with a load average of {report['load_average_before']:.1f} from other work before the run, "
        f"Python {report['python']}, SQLite {report['sqlite']}, {day}.)"
    )


def families(report: dict[str, Any]) -> str:
    """The matrix harness x family."""
    head, *rows = report["grid"]
    counts, versions = report["counts"], report["versions"]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return (
        f"| {' | '.join(head)} |\n{'|---' * len(head)}|\n{table}\n\n"
        f"{counts['cells']:,} cells, {counts['real']:,} of them with real releases: {counts['calls']:,} calls, "
        f"{counts['bridged']:,} of {counts['continuing']:,} continuing prompts bridged, {counts['trained_tokens']:,} trained "
        f"tokens, {counts['violations']} violations, {counts['failed']} cells failed. (renderers {versions['renderers']}, "
        f"trl {versions['trl']}, {report['cores']} cores, Python {versions['python']}, {report['time'][:10]}.)"
    )


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "demo": ("demo", demo),
    "demo_record": ("demo", demo_record),
    "fidelity": ("fidelity", fidelity),
    "families": ("families", families),
    "bench_reconstruct": ("bench_reconstruct", bench_reconstruct),
    "faults": ("faults", faults),
    "bench_calllog": ("bench_calllog", bench_calllog),
    "bench_proxy": ("bench_proxy", bench_proxy),
    "bench_viewer": ("bench_viewer", bench_viewer),
    "bench_scale": ("bench_scale", bench_scale),
    "trainers": ("trainers", trainers),
    "rollouts": ("rollouts", rollouts),
    "ray_kill": ("ray_kill", ray_kill),
}
"""Marker → the report it is made from, and how."""


def read_report(source: str) -> dict[str, Any] | None:
    """`reports/<source>.json`. The demo's may be several, `reports/demo-<seed>.json`: their runs are put together."""
    folder = ROOT / "reports"
    paths = [folder / f"{source}.json", *(sorted(folder.glob("demo-*.json")) if source == "demo" else ())]
    reports = [json.loads(path.read_text()) for path in paths if path.exists()]
    if not reports:
        return None
    whole = dict(reports[0])
    for report in reports[1:]:
        for name in ("runs", "calls", "sampled_tokens", "kept_tokens", "rows", "merges"):
            whole[name] = whole[name] + report[name]
        whole["breaks"] = dict(Counter(whole["breaks"]) + Counter(report["breaks"]))
        whole["weight_versions"] = max(whole["weight_versions"], report["weight_versions"])
        whole["time"] = max(whole["time"], report["time"])
    return whole


def main() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for name, (source, table) in TABLES.items():
        report = read_report(source)
        if report is None:
            print(f"tables: no reports/{source}.json; its tables stay as they are", file=sys.stderr)
            continue
        text = table(report)
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        for page in pages:
            before = page.read_text()
            after = pattern.sub(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", before)
            if after != before:
                page.write_text(after)
                print(f"tables: {name} in {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
