"""Samples, checkpoints and listings through the published tinker SDK over a socket."""

import pickle
import warnings

import numpy as np
import pytest

from cookbook.backends.local import LocalService
from cookbook.core import types as ours
from tests.serve.live_server import API_KEY
from tests.serve.sdk_models import PROMPT, RANK, TARGETS, assert_same, mine, step, theirs

tinker = pytest.importorskip("tinker", reason="the tinker SDK is not installed: pip install -e '.[tinker]'")
types = tinker.types

GREEDY, SEEDED = types.SamplingParams(max_tokens=6, temperature=0.0), types.SamplingParams(max_tokens=12, seed=11)


def sample_both(remote, local, params, stop: tuple = (), num_samples: int = 4):
    got = remote.sample(
        types.ModelInput.from_ints(PROMPT), num_samples, params, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    mine = ours.SamplingParams(params.max_tokens, params.temperature, params.top_p, params.top_k, stop, params.seed)
    expected = local.sample(ours.ModelInput.from_ints(PROMPT), num_samples, mine, True, 3).result()
    assert [s.tokens for s in got.sequences] == [s.tokens for s in expected.sequences]
    for sequence, other in zip(got.sequences, expected.sequences, strict=True):
        np.testing.assert_allclose(sequence.logprobs, other.logprobs, atol=1e-4)
        assert sequence.stop_reason == ("length" if other.stop_reason == "length" else "stop")
    assert got.prompt_logprobs[0] is None and got.prompt_logprobs[1:] == pytest.approx(
        expected.prompt_logprobs[1:], abs=1e-4
    )
    assert got.topk_prompt_logprobs[0] is None
    assert [[token for token, _ in row] for row in got.topk_prompt_logprobs[1:]] == [
        [token for token, _ in row] for row in expected.topk_prompt_logprobs[1:]
    ]
    assert len({s.sequence_id for s in got.sequences}) == num_samples
    return got


def test_samples_of_live_weights(pair) -> None:
    remote, local = pair
    step(pair)
    sampler, other = (
        remote.save_weights_and_get_sampling_client().result(),
        local.save_weights_and_get_sampling_client(),
    )
    assert sampler.get_base_model() == "tiny"
    plain = sample_both(sampler, other, SEEDED)
    assert sample_both(sampler, other, SEEDED).sequences[0].tokens == plain.sequences[0].tokens
    sample_both(sampler, other, types.SamplingParams(max_tokens=8, seed=5, temperature=0.7, top_k=20, top_p=0.9))
    sample_both(sampler, other, GREEDY, num_samples=1)
    fresh = [
        sampler.sample(types.ModelInput.from_ints(PROMPT), 8, types.SamplingParams(max_tokens=8)).result()
        for _ in range(2)
    ]
    assert [s.tokens for s in fresh[0].sequences] != [s.tokens for s in fresh[1].sequences]
    got = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()
    expected = other.compute_logprobs(ours.ModelInput.from_ints(PROMPT)).result()
    assert got[0] is None and got[1:] == pytest.approx(expected[1:], abs=1e-4)
    step(pair)
    sample_both(sampler, other, SEEDED)  # pinned: the step changed neither


@pytest.mark.parametrize("as_list", [True, False])
def test_stops(pair, as_list: bool) -> None:
    remote, local = pair
    sampler, other = (
        remote.save_weights_and_get_sampling_client().result(),
        local.save_weights_and_get_sampling_client(),
    )
    free = sample_both(sampler, other, SEEDED, num_samples=1).sequences[0].tokens
    text = local.get_tokenizer().decode(free[:2])[-1]
    stop = [text] if as_list else text
    got = sample_both(sampler, other, types.SamplingParams(max_tokens=12, seed=11, stop=stop), (text,), 1).sequences[0]
    assert got.stop_reason == "stop" and len(got.tokens) <= 2
    got = sample_both(
        sampler, other, types.SamplingParams(max_tokens=12, seed=11, stop=[free[1]]), (free[1],), 1
    ).sequences[0]
    assert got.stop_reason == "stop" and got.tokens == free[: free.index(free[1]) + 1]


def test_save_and_load_state(pair, sdk_client, local: LocalService) -> None:
    remote, other = pair
    step(pair)
    saved, saved_here = remote.save_state("one").result(), other.save_state("one").result()
    assert saved.path == f"tinker://{remote.model_id}/weights/one"
    step(pair)
    for with_optimizer in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            if with_optimizer:
                remote.load_state_with_optimizer(saved.path).result()
                other.load_state_with_optimizer(saved_here.path).result()
            else:
                remote.load_state(saved.path).result()
                other.load_state(saved_here.path).result()
        step(pair)
        assert_same(
            remote.forward(theirs(TARGETS), "cross_entropy").result(),
            other.forward(mine(TARGETS), "cross_entropy").result(),
        )
    for with_optimizer in (False, True):
        suffix = "_with_optimizer" if with_optimizer else ""
        again = getattr(sdk_client, f"create_training_client_from_state{suffix}")(saved.path).result()
        assert again.get_info().lora_rank == RANK and again.get_info().model_data.model_name == "tiny"
        copy = (again, local.create_training_client_from_state(saved_here.path, with_optimizer))
        step(copy)
        got, expected = (
            copy[0].forward(theirs(TARGETS), "cross_entropy"),
            copy[1].forward(mine(TARGETS), "cross_entropy"),
        )
        assert_same(got.result(), expected.result())


def test_saved_names_are_kept_unless_overwritten(pair) -> None:
    remote, _ = pair
    remote.save_state("twice").result()
    with pytest.raises(tinker.RequestFailedError, match="exists; save under another name"):
        remote.save_state("twice").result()
    remote.save_state("twice", overwrite=True).result()
    with pytest.raises(tinker.RequestFailedError, match="checkpoint name"):
        remote.save_state("../twice").result()
    remote.save_state("after", ttl_seconds=3600).result()  # refusals leave no gap in the order


def test_sampler_from_a_path_and_of_the_base_model(pair, sdk_client, local: LocalService) -> None:
    remote, other = pair
    step(pair)
    path, here = remote.save_weights_for_sampler("s").result().path, other.save_weights_for_sampler("s").result().path
    sampler = sdk_client.create_sampling_client(model_path=path).result()
    assert sampler.get_base_model() == "tiny"
    sample_both(sampler, local.create_sampling_client(model_path=here), SEEDED)
    base, base_here = (
        sdk_client.create_sampling_client(base_model="tiny").result(),
        local.create_sampling_client(base_model="tiny"),
    )
    sample_both(base, base_here, SEEDED)
    for copy in (
        pickle.loads(pickle.dumps(sampler)),
        tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=API_KEY),
    ):
        assert copy._request_id_counter > 2**29, "copies number their requests far above the original's"
        sample_both(copy, local.create_sampling_client(model_path=here), SEEDED)


def test_listings(url: str, pair, sdk_client) -> None:
    remote, _ = pair
    remote.save_weights_for_sampler("listed", ttl_seconds=7200).result()
    state = remote.save_state("listed").result().path
    rest = tinker.RestClient(base_url=url, api_key=API_KEY)
    assert [model.model_name for model in rest.get_server_capabilities().result().supported_models] == ["tiny"]
    run = rest.get_training_run_by_tinker_path(state).result()
    assert (run.training_run_id, run.base_model, run.is_lora, run.lora_rank) == (remote.model_id, "tiny", True, RANK)
    assert run.last_checkpoint.tinker_path == state
    page = rest.list_training_runs(limit=1).result()
    assert page.training_runs[0].training_run_id == remote.model_id and page.cursor.total_count >= 1
    found = {c.checkpoint_id: c for c in rest.list_checkpoints(remote.model_id).result().checkpoints}
    assert {key: c.checkpoint_type for key, c in found.items()} == {
        "weights/listed": "training",
        "sampler_weights/listed": "sampler",
    }
    assert found["weights/listed"].expires_at is None and found["sampler_weights/listed"].expires_at is not None
    assert found["weights/listed"].size_bytes > 0
    assert state in [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == ("tiny", True, RANK)
    session_id = sdk_client.holder.get_session_id()
    assert session_id in rest.list_sessions().result().sessions
    session = rest.get_session(session_id).result()
    assert remote.model_id in session.training_run_ids
    assert (session.user_metadata, session.display_name) == ({"who": "test"}, "named")
    rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    assert rest.get_training_run(remote.model_id).result().last_checkpoint.expires_at is not None
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert [c.checkpoint_id for c in rest.list_checkpoints(remote.model_id).result().checkpoints] == [
        "sampler_weights/listed"
    ]
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        rest.get_weights_info_by_tinker_path(state).result()
    with pytest.raises(tinker.NotFoundError, match="publishing is not supported"):
        rest.publish_checkpoint_from_tinker_path(found["sampler_weights/listed"].tinker_path).result()
    with pytest.raises(tinker.NotFoundError, match="is not an endpoint"):
        rest.copy_weights(found["sampler_weights/listed"].tinker_path, destination_project_id="p").result()


def test_bad_samples_fail_at_once(sdk_client) -> None:
    sampler = sdk_client.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints(PROMPT)
    for message, arguments in {
        "max_tokens is missing": {"sampling_params": types.SamplingParams()},
        "end-of-sequence": {"sampling_params": types.SamplingParams(max_tokens=4, stop=[])},
        "temperature is -1": {"sampling_params": types.SamplingParams(max_tokens=4, temperature=-1)},
        "num_samples is 0": {"sampling_params": GREEDY, "num_samples": 0},
        "topk_sample_logprobs is not supported": {"sampling_params": GREEDY, "topk_sample_logprobs": 2},
        "prompt_alt_tokens_k is not supported": {"sampling_params": GREEDY, "prompt_alt_tokens_k": 2},
        "exceed the context": {"sampling_params": types.SamplingParams(max_tokens=10**6)},
    }.items():
        with pytest.raises(tinker.RequestFailedError, match=message):
            sampler.sample(**{"prompt": prompt, "num_samples": 1, **arguments}).result(timeout=20)


def test_what_cannot_be_made_is_refused_at_once(sdk_client) -> None:
    with pytest.raises(tinker.BadRequestError, match="served are tiny"):
        sdk_client.create_lora_training_client("tinny").result(timeout=20)
    with pytest.raises(tinker.BadRequestError, match="train_mlp"):
        sdk_client.create_lora_training_client("tiny", train_mlp=False).result(timeout=20)
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        sdk_client.create_training_client_from_state("tinker://x/weights/y").result(timeout=20)
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        sdk_client.create_sampling_client(model_path="tinker://x/sampler_weights/y").result(timeout=20)


def test_a_closed_session_says_so(url: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=API_KEY)
    model = service.create_lora_training_client("tiny", rank=4).result(timeout=60)
    sampler = pickle.dumps(model.save_weights_and_get_sampling_client().result())
    path = model.save_state("last").result().path
    service.close("errored", detail="enough").result(timeout=30)
    with pytest.raises(tinker.APIStatusError, match=r"is Stopped \(errored: enough\); create a new session") as caught:
        pickle.loads(sampler).sample(types.ModelInput.from_ints(PROMPT), 1, GREEDY).result(timeout=20)
    assert caught.value.status_code == 410
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as another:
        another.create_training_client_from_state(path).result(timeout=60)
