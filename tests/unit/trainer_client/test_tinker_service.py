"""The endpoint as a service: who may use it, retries, other clients, restarts, and sampling from what was trained."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types
from tokenizers import Tokenizer

from rolltap.engine.tiny import FOLDER
from rolltap.errors import ConfigError
from rolltap.trainer_client.endpoint.app import kept_key, keyed
from rolltap.trainer_client.endpoint.saved import METADATA_FILE, Library, SavedWeights
from rolltap.trainer_client.endpoint.sessions import SILENT_S

from .tinkering import KEY, Service, datum, serving

IDS = [*range(30, 50)]
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(FOLDER, tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    yield running
    running.close_clients()


def post(service: Service, path: str, body: Any, key: str = KEY) -> httpx.Response:
    return httpx.post(f"{service.url}/api/v1{path}", json=body, headers={"X-API-Key": key}, timeout=40)


def step(client: tinker.TrainingClient) -> None:
    client.forward_backward([datum(IDS, weights=1.0)], "cross_entropy")
    client.optim_step(ADAM).result()


def prompt(ids: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(ids)


GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0)


def test_nothing_without_the_key(service: Service) -> None:
    with pytest.raises(tinker.AuthenticationError, match="set TINKER_API_KEY"):
        tinker.ServiceClient(base_url=service.url, api_key="tml-anothers-key-000000").holder  # noqa: B018
    assert httpx.get(f"{service.url}/api/v1/healthz").json() == {"status": "ok"}
    for method, path in (("POST", "/api/v1/create_session"), ("GET", "/api/v1/nothing"), ("GET", "/")):
        assert httpx.request(method, service.url + path).status_code == 401
    for key in ("", "secret", "tml-short"):
        with pytest.raises(ConfigError, match="the key must begin with 'tml-'"):
            keyed(None, key)


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    key = kept_key(tmp_path)
    assert kept_key(tmp_path) == key
    assert len(key) > 40
    assert (tmp_path / "tinker-key").stat().st_mode & 0o777 == 0o600


def test_requests_take_their_turns_and_each_is_done_once(service: Service) -> None:
    """Sent in another order, and again, as a client does that had no answer."""
    client = service.train(2)
    learner = service.trained(client).learner
    adam = {"model_id": client.model_id, "adam_params": ADAM.model_dump()}
    later = post(service, "/optim_step", {**adam, "seq_id": 2}).json()["request_id"]
    assert post(service, "/optim_step", {**adam, "seq_id": 2}).json()["request_id"] == later
    waits = httpx.Client(base_url=f"{service.url}/api/v1", headers={"X-API-Key": KEY})
    with pytest.raises(httpx.ReadTimeout):
        waits.post("/retrieve_future", json={"request_id": later}, timeout=0.3)
    client.forward_backward([datum(IDS, weights=1.0)], "cross_entropy").result()  # the SDK's first, seq_id 1
    first, again = (post(service, "/retrieve_future", {"request_id": later}) for _ in range(2))
    assert first.json()["metrics"]["grad_norm"] > 0
    assert first.content == again.content
    assert {int(state["step"]) for state in learner.optimiser.state.values()} == {1}
    other = post(service, "/optim_step", {**adam, "seq_id": 2, "adam_params": {"learning_rate": 1.0}})
    assert (other.status_code, other.json()["detail"]) == (400, f"{later}: another request had this number")
    waits.close()


def test_clients_have_models_of_their_own_and_there_are_not_too_many(tmp_path: Path) -> None:
    with serving(FOLDER, tmp_path, models=2) as service:
        one = service.train(2)
        service.endpoint.sessions.of(one.model_id).seen -= SILENT_S
        two = service.train(2)
        step(one)
        data = [datum(IDS, weights=1.0)]
        before, after = (each.forward(data, "cross_entropy").result().metrics["loss:sum"] for each in (two, one))
        assert after < before
        with pytest.raises(tinker.BadRequestError, match=f"2 models are in training, .*{one.model_id}"):
            service.train(2)
        post(service, f"/sessions/{two.model_id.partition(':')[0]}/finish", {"status": "success"})
        service.train(2)
        with pytest.raises(tinker.NotFoundError, match="has ended, or is of a service that was started anew"):
            two.forward(data, "cross_entropy").result()
        service.endpoint.sessions.of(one.model_id).seen -= SILENT_S
        service.train(2)
        assert post(service, "/session_heartbeat", {"session_id": one.model_id.partition(":")[0]}).status_code == 410


def test_a_service_that_was_killed_has_what_was_saved(tmp_path: Path) -> None:
    with serving(FOLDER, tmp_path) as service:
        client = service.train(2, user_metadata={"renderer_name": "qwen3"})
        step(client)
        state = client.save_state("kept", user_metadata={"by": "me"}).result().path
        sampler = client.save_weights_for_sampler("kept").result().path
        client.save_weights_and_get_sampling_client().result()
        expected = client.forward([datum(IDS, weights=1.0)], "cross_entropy").result().metrics
        model = client.model_id
    (tmp_path / model / "weights" / ".making-half").mkdir()
    with serving(FOLDER, tmp_path) as service:
        step_again = {"model_id": model, "seq_id": 9, "adam_params": {}}
        lost = post(service, "/optim_step", step_again)
        assert (lost.status_code, "make a ServiceClient" in lost.json()["detail"]) == (404, True)
        gone = post(service, "/retrieve_future", {"request_id": f"{model}:3"})
        assert (gone.status_code, "started anew" in gone.json()["detail"]) == (404, True)
        resumed = service.client().create_training_client_from_state_with_optimizer(state).result()
        assert resumed.get_info().lora_rank == 2
        assert resumed.forward([datum(IDS, weights=1.0)], "cross_entropy").result().metrics == pytest.approx(expected)
        service.client().create_sampling_client(sampler).result().sample(prompt(IDS), 1, GREEDY).result()
        assert sorted(path.name for path in (tmp_path / model).glob("*/*")) == ["kept", "kept"]
        headers = {"X-API-Key": KEY}
        run = httpx.get(f"{service.url}/api/v1/training_runs/{model}", headers=headers).json()
        assert types.TrainingRun.model_validate(run).last_checkpoint.tinker_path == state  # type: ignore[union-attr]
        assert run["user_metadata"] == {"renderer_name": "qwen3"}
        assert run["last_checkpoint"]["user_metadata"] == {"by": "me"}
        url = f"{service.url}/api/v1/training_runs/{model}/checkpoints"
        assert [one["tinker_path"] for one in httpx.get(url, headers=headers).json()["checkpoints"]] == [state, sampler]
        assert httpx.delete(f"{url}/weights/kept", headers=headers).status_code == 204
        with pytest.raises(tinker.NotFoundError, match="nothing is saved there"):
            service.client().create_training_client_from_state(state).result()


def test_what_is_saved_over_a_model_of_another_name_opens_again(tmp_path: Path) -> None:
    with serving(FOLDER, tmp_path) as service:
        state = service.train(2).save_state("kept").result().path
    with serving(FOLDER, tmp_path, name="renamed") as service:
        opened = service.client().create_training_client_from_state(state, base_model="renamed").result()
        again = opened.save_state("again").result().path
        service.client().create_training_client_from_state(again).result()


def test_names_are_no_ways_out_of_the_folder(service: Service) -> None:
    client = service.train(2)
    for name in ("../up", "a/b", ".hidden", "a b"):
        with pytest.raises(tinker.RequestFailedError, match=r"names have letters|is not tinker://"):
            client.save_state(name).result()
    for path in ("tinker://../weights/x", "tinker://a/b/c", "tinker:///weights/x", "/etc/passwd"):
        with pytest.raises(tinker.BadRequestError, match=r"is not tinker://|names have letters"):
            service.client().create_training_client_from_state(path).result()


def test_names_are_taken_once_and_may_run_out(service: Service) -> None:
    client = service.train(2)
    client.save_state("one").result()
    with pytest.raises(tinker.RequestFailedError, match="the name is taken; save with overwrite"):
        client.save_state("one").result()
    path = client.save_state("one", overwrite=True, ttl_seconds=3600).result().path
    library = service.endpoint.library
    saved = SavedWeights(client.model_id, "weights", "one")
    assert 3500 < (library.metadata(saved).expires or 0) - time.time() < 3700
    about = library.folder(saved) / METADATA_FILE
    about.write_text(json.dumps({**json.loads(about.read_text()), "expires": 1.0}))
    client.save_state("two").result()
    with pytest.raises(tinker.NotFoundError, match="nothing is saved there, or no longer"):
        service.client().create_training_client_from_state(path).result()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_model": "Qwen/Qwen3-8B"}, "base_model: 'Qwen/Qwen3-8B' is not served here; '.*weights' is"),
        ({"rank": 5000}, "the rank is 5000; 0 .* to 1024 are taken"),
        ({"optimizer": types.DimuonOptimizerConfig()}, "'dimuon' is not supported here, adamw is"),
    ],
)
def test_models_that_can_not_be_made(service: Service, options: dict[str, Any], message: str) -> None:
    given = {"base_model": str(FOLDER), "rank": 2, **options}
    with pytest.raises(tinker.BadRequestError, match=message):
        service.client().create_lora_training_client(**given).result()


def test_a_sampler_says_what_training_computes(service: Service) -> None:
    """Its log-probs, of samples and of the prompt, are those of the weights that it was made of, whatever is trained
    after it."""
    client = service.train(4)
    step(client)
    sampler = client.save_weights_and_get_sampling_client().result()
    reference = client.forward([datum(IDS, weights=1.0)], "cross_entropy").result().loss_fn_outputs[0]
    before = sampler.sample(prompt(IDS[:5]), 1, GREEDY).result().sequences[0].tokens
    step(client)
    scores = sampler.compute_logprobs(prompt(IDS)).result()
    assert scores[0] is None
    np.testing.assert_allclose(scores[1:], reference["logprobs"].to_numpy(), atol=1e-3)  # type: ignore[arg-type]
    options = types.SamplingParams(max_tokens=5, seed=3)
    reply = sampler.sample(prompt(IDS[:5]), 2, options, topk_sample_logprobs=3).result()
    assert [len(one.tokens) for one in reply.sequences] == [len(one.logprobs or ()) for one in reply.sequences]
    assert len({one.sequence_id for one in reply.sequences}) == 2
    first = reply.sequences[0]
    ids = [*IDS[:5], *first.tokens]
    np.testing.assert_allclose(sampler.compute_logprobs(prompt(ids)).result()[5:], first.logprobs, atol=1e-3)  # type: ignore[arg-type]
    assert [len(row or ()) for row in first.topk_logprobs or ()] == [3] * len(first.tokens)
    assert sampler.sample(prompt(IDS[:5]), 2, options).result().sequences[0].tokens == first.tokens
    assert sampler.sample(prompt(IDS[:5]), 1, GREEDY).result().sequences[0].tokens == before


def test_parts_of_the_prompt_are_scored(service: Service) -> None:
    sampler = service.client().create_sampling_client(base_model=str(FOLDER)).result()
    whole = sampler.compute_logprobs(prompt(IDS)).result()
    last = sampler.compute_logprobs(prompt(IDS), prompt_logprobs_last_n=4).result()
    assert last == [*[None] * (len(IDS) - 4), *whole[-4:]]
    reply = sampler.sample(prompt(IDS), 1, GREEDY, True, topk_prompt_logprobs=2).result()
    assert [None if row is None else len(row) for row in reply.topk_prompt_logprobs or ()] == [None, *[2] * 19]


def test_samples_end_where_they_should(service: Service) -> None:
    sampler = service.client().create_sampling_client(base_model=str(FOLDER)).result()
    free = sampler.sample(prompt(IDS), 1, GREEDY).result().sequences[0]
    assert (len(free.tokens), free.stop_reason) == (6, "length")
    stop = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[free.tokens[1]])
    stopped = sampler.sample(prompt(IDS), 1, stop).result().sequences[0]
    assert (stopped.tokens, stopped.stop_reason) == (free.tokens[: free.tokens.index(free.tokens[1]) + 1], "stop")


def test_samples_end_at_a_string(service: Service) -> None:
    """It may begin and end within tokens; the last one stays whole. One in the prompt ends nothing."""
    sampler = service.client().create_sampling_client(base_model=str(FOLDER)).result()
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    start = tokenizer.encode("<|im_start|>user\nCopy apple.txt to pear.txt.<|im_end|>\n<|im_start|>assistant\n").ids
    free = sampler.sample(prompt(start), 1, types.SamplingParams(max_tokens=12, temperature=0.0)).result().sequences[0]
    stop = types.SamplingParams(max_tokens=12, temperature=0.0, stop=["apple.txt to", 'me": "ba'])
    for one in sampler.sample(prompt(start), 2, stop).result().sequences:
        assert (one.tokens, one.stop_reason) == (free.tokens[: len(one.tokens)], "stop")
        assert tokenizer.decode(one.tokens, skip_special_tokens=False) == '<tool_call>\n{"name": "bash'


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_params": {"stop": ["end", ""]}}, "stop: an empty string ends nothing"),
        ({"sampling_params": {"temperature": -1.0}}, "temperature"),
        ({"num_samples": 65}, "`int` <= 64"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported here"),
        ({"prompt": {"chunks": [{"type": "image", "data": "aGk=", "format": "png"}]}}, "prompt: only text here"),
    ],
)
def test_samples_that_are_not_drawn_are_refused(service: Service, fields: dict[str, Any], message: str) -> None:
    sampler = service.client().create_sampling_client(base_model=str(FOLDER)).result()
    text = {"chunks": [{"type": "encoded_text", "tokens": IDS}]}
    body = {"sampling_session_id": sampler._sampling_session_id, "seq_id": 1, "prompt": text, "sampling_params": {}}
    answer = post(service, "/asample", {**body, **fields})
    assert answer.status_code == 400
    assert message in answer.json()["detail"]


def test_a_sampler_can_follow_the_training(service: Service) -> None:
    client = service.train(4)
    follower = client.save_weights_and_get_sampling_client(kind="inflight").result()
    before = follower.compute_logprobs(prompt(IDS)).result()
    step(client)
    client.save_weights_and_get_sampling_client(kind="inflight").result()
    assert follower.compute_logprobs(prompt(IDS)).result() != before


def test_old_snapshots_without_a_name_go(service: Service) -> None:
    client = service.train(2)
    samplers = [client.save_weights_and_get_sampling_client().result() for _ in range(6)]
    samplers[-1].sample(prompt(IDS), 1, GREEDY).result()
    with pytest.raises(tinker.RequestFailedError, match="the snapshot is gone; of a model the newest 4"):
        samplers[0].sample(prompt(IDS), 1, GREEDY).result()


def test_samples_that_nobody_waits_for_end(service: Service) -> None:
    sampler = service.client().create_sampling_client(base_model=str(FOLDER)).result()
    session, chunks = sampler._sampling_session_id, [{"type": "encoded_text", "tokens": IDS}]
    params = {"max_tokens": 4000, "stop": []}
    body = {"sampling_session_id": session, "seq_id": 50, "prompt": {"chunks": chunks}, "sampling_params": params}
    id = post(service, "/asample", body).json()["request_id"]
    post(service, "/cancel_future", {"request_id": id})
    answer = post(service, "/retrieve_future", {"request_id": id}).json()
    assert answer == {"error": "it was cancelled", "category": "user"}


def test_expired_weights_go_at_the_start(tmp_path: Path) -> None:
    library = Library(tmp_path)
    for name, expires in (("old", 1.0), ("new", time.time() + 100)):
        folder = library.reserve_name(SavedWeights("m", "weights", name))
        folder.mkdir()
        (folder / METADATA_FILE).write_text(json.dumps({"base_model": "b", "rank": 2, "expires": expires}))
    library.tidy()
    assert [saved.name for saved, _ in library.all()] == ["new"]
