"""The files of `deploy/` for containers and clusters agree with `rolltap up --local`, and with each other."""

from __future__ import annotations

import itertools
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolltap.deployment.description import (
    COMPOSE,
    PASSWORDS,
    PROXIES,
    REDIS_SETTINGS,
    new_secrets,
    nginx_settings,
    postgres_arguments,
    proxy_environment,
)
from rolltap.deployment.local import Child, LocalDeployment, LocalOptions, program
from rolltap.settings import KeySettings, LimitSettings, Settings

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
SERVER = DEPLOY / "kubernetes" / "server"
VARIABLES = {
    **{role: f"${{{role.upper()}_KEY}}" for role in KeySettings.model_fields},
    **{f"{name}_password": f"${{{name.upper()}_PASSWORD}}" for name in PASSWORDS},
}
"""How compose.yaml names each secret."""


def compose() -> dict[str, Any]:
    text = (DEPLOY / "compose" / "compose.yaml").read_text()
    return yaml.safe_load(re.sub(r"(\$\{\w+):\?[^}]*\}", r"\1}", text))["services"]


def test_what_follows_from_the_description_is_written() -> None:
    files = runpy.run_path(str(ROOT / "scripts" / "deploy_files.py"))["files"]()
    stale = [str(path.relative_to(ROOT)) for path, text in files.items() if path.read_text() != text]
    assert stale == [], "run scripts/deploy_files.py"


@pytest.mark.parametrize("proxy", PROXIES)
def test_composes_proxies_have_the_environment_of_local_ones(proxy: str) -> None:
    expected = proxy_environment(COMPOSE, proxy, "/data", VARIABLES)
    assert compose()[proxy]["environment"] == expected


def test_composes_servers_are_started_as_local_ones() -> None:
    services = compose()
    redis_settings = {**REDIS_SETTINGS, "requirepass": "${REDIS_PASSWORD}"}
    redis_arguments = [part for name, value in redis_settings.items() for part in (f"--{name}", value)]
    assert services["postgres"]["command"] == ["postgres", *postgres_arguments()]
    assert services["redis"]["command"] == ["redis-server", *redis_arguments]
    engine = services["engine"]
    assert engine["environment"] == {"ROLLTAP_ENGINE_KEY": VARIABLES["engine_password"]}
    assert engine["command"][-1] == str(COMPOSE.port("engine"))
    assert services["postgres"]["stop_signal"] == "SIGINT"
    grace_s = int(services["proxy-1"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > LimitSettings().drain_s + LimitSettings().unready_s


def test_compose_has_the_local_services_and_a_dashboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rolltap.deployment.local.find", lambda name: f"/usr/bin/{name}")
    local = LocalDeployment(LocalOptions(tmp_path))._services()
    assert compose().keys() == {*local, "grafana"}


def test_composes_files_exist_and_images_have_a_version() -> None:
    folder = DEPLOY / "compose"
    for name, service in compose().items():
        for source in (volume.partition(":")[0] for volume in service.get("volumes", ())):
            assert not source.startswith(".") or (folder / source).resolve().is_file(), (name, source)
        if build := service.get("build"):
            assert (folder / build["context"] / build["dockerfile"]).is_file()
        else:
            assert re.search(r":v?\d+\.?\d*", service["image"]), name
        assert service["restart"] == "unless-stopped", name


def test_every_secret_of_compose_is_made_once(tmp_path: Path) -> None:
    script = DEPLOY / "compose" / "secrets.sh"
    subprocess.run([script, tmp_path], check=True)
    made = dict(line.split("=") for line in (tmp_path / ".env").read_text().splitlines())
    named = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose" / "compose.yaml").read_text()))
    assert named - made.keys() == set()
    assert len({*made.values()}) == len(made)
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "viewer_key").read_text() == made["VIEWER_KEY"]
    subprocess.run([script, tmp_path], check=True, capture_output=True)
    assert dict(line.split("=") for line in (tmp_path / ".env").read_text().splitlines()) == made


@pytest.mark.parametrize("pinned", [True, False])
def test_nginx_takes_what_compose_gives_it(tmp_path: Path, pinned: bool) -> None:
    text = nginx_settings(COMPOSE, pinned=pinned)
    for proxy in PROXIES:  # names that only the network of the containers knows
        text = text.replace(f"server {proxy}:", "server 127.0.0.1:")
    (tmp_path / "site.conf").write_text(text)
    whole = tmp_path / "nginx.conf"
    whole.write_text(f"pid {tmp_path}/pid;\nevents {{ }}\nhttp {{ access_log off; include {tmp_path}/site.conf; }}\n")
    command = [program("nginx"), "-t", "-c", str(whole), "-e", str(tmp_path / "error.log")]
    checked = subprocess.run(command, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert ("hash " in text) == pinned


def documents() -> list[dict[str, Any]]:
    names = yaml.safe_load((SERVER / "kustomization.yaml").read_text())["resources"]
    return [each for name in names for each in yaml.safe_load_all((SERVER / name).read_text())]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [each for each in documents() if each["kind"] == kind]


def test_the_services_that_nodes_name_are_the_proxies() -> None:
    (job,) = yaml.safe_load_all((DEPLOY / "kubernetes" / "nodes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    url = next(each["value"] for each in container["env"] if each["name"] == "ROLLTAP_ADMIN_URL")
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind("Service")}
    host, port = url.removeprefix("http://").split(":")
    assert [each["port"] for each in services[host]["ports"]] == [int(port)]
    (proxies,) = of_kind("StatefulSet")
    pod = proxies["spec"]["template"]
    (proxy,) = pod["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in proxy["ports"]}
    for spec in services.values():
        assert spec["selector"].items() <= pod["metadata"]["labels"].items()
        assert all(ports[each["targetPort"]] == each["port"] for each in spec["ports"])
    (policy,) = of_kind("NetworkPolicy")
    opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert opened == ports.keys()
    assert job["spec"]["template"]["metadata"]["labels"] in [
        peer["podSelector"].get("matchLabels")
        for rule in policy["spec"]["ingress"]
        if {"port": "admin"} in rule["ports"]
        for peer in rule["from"]
    ]


def test_pods_are_given_secrets_by_reference_probes_and_time_to_drain() -> None:
    (proxies,) = of_kind("StatefulSet")
    pod = proxies["spec"]["template"]["spec"]
    (proxy,) = pod["containers"]
    limits = LimitSettings()
    assert pod["terminationGracePeriodSeconds"] > limits.drain_s + 10 * limits.unready_s
    assert "Unconfined" not in "".join(path.read_text() for path in SERVER.iterdir())
    assert pod["securityContext"]["runAsNonRoot"]
    assert proxy["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert proxy["livenessProbe"]["httpGet"]["path"] == "/health"
    sections = Settings.model_fields
    for each in proxy["env"]:
        section, _, key = each["name"].removeprefix("ROLLTAP_").lower().partition("__")
        model: Any = sections[section].annotation
        assert not key or key in model.model_fields, each["name"]
        is_secret = section == "keys" or key in ("url", "ingest")
        assert ("secretKeyRef" in each.get("valueFrom", {})) == is_secret, each["name"]
    named = {each["valueFrom"]["secretKeyRef"]["key"] for each in proxy["env"] if "valueFrom" in each}
    made = (SERVER / "kustomization.yaml").read_text()
    roles = re.search(r"for role in ([\w ]+);", made)
    assert roles is not None
    assert named == {*re.findall(r"literal=([\w-]+)=", made), *(f"{role}-key" for role in roles[1].split())}
    assert {mount["name"] for mount in proxy["volumeMounts"]} == {
        *(volume["name"] for volume in pod["volumes"]),
        *(claim["metadata"]["name"] for claim in proxies["spec"]["volumeClaimTemplates"]),
    }
    (budget,) = of_kind("PodDisruptionBudget")
    assert (
        budget["spec"]["selector"]["matchLabels"].items() <= proxies["spec"]["template"]["metadata"]["labels"].items()
    )


def test_new_secrets_are_keys_of_every_role() -> None:
    first, second = new_secrets(), new_secrets()
    assert first.keys() == VARIABLES.keys()
    assert not {*first.values()} & {*second.values()}


def test_a_process_that_ends_at_once_is_started_again_after_pauses_that_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("rolltap.deployment.local.time.monotonic", lambda: now[0])
    child = Child("child", ["false"], tmp_path / "log")
    child.start()
    starts: list[float] = []
    for _ in range(200):
        assert child.process is not None
        child.process.wait()
        if child.look():
            starts.append(now[0])
        now[0] += 0.25
    assert [after - before for before, after in itertools.pairwise(starts)][:3] == [2.25, 4.25, 8.25]
    child.wanted = False
    child.process = None
    assert child.look() == ""
