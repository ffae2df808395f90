"""Each known fault on the unmended vLLM. A test that fails here says that the installed vLLM has the fault no more."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from transformers import LlamaForCausalLM

from paceline.engines.vllm import workarounds
from paceline.engines.vllm.front import Launch, VllmError
from paceline.engines.vllm.offline import OfflineFront
from paceline.engines.vllm.versions import installed
from paceline.engines.vllm.weights import Weights
from paceline.schema import SamplingParams
from vllm_models import save_tiny, settings

pytestmark = pytest.mark.vllm

GONE = "vLLM has this fault no more: say so in its entry of workarounds.FAULTS (until)"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def front(model: Path) -> Iterator[OfflineFront]:
    arguments = settings(
        model,
        worker_extension_cls="paceline.engines.vllm.worker.WorkerExtension",
        weight_transfer_config={"backend": "paceline"},
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
    )
    made = OfflineFront(Launch(arguments))
    yield made
    made.close()


@pytest.fixture
def runner(front: OfflineFront) -> Any:
    return front.rpc(lambda worker: worker.model_runner)[0]


def mended(front: OfflineFront, mend: bool) -> list[str]:
    return front.rpc("paceline_mend", mend)[0]


def moved(model: Path, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    policy = LlamaForCausalLM.from_pretrained(model)
    return {name: tensor.detach() + torch.randn_like(tensor) for name, tensor in policy.named_parameters()}


def test_the_faults_of_the_installed_vllm_are_mended_by_name(front: OfflineFront) -> None:
    here = {fault.name for fault in workarounds.faults_here().values() if fault.answer == "mended"}
    assert {*mended(front, True), "second_engine"} == here | {"second_engine"}
    assert mended(front, False) == []


def test_expand_batch_to_tokens_returns_uninitialised_memory(front: OfflineFront) -> None:
    from vllm.v1.sample import rejection_sampler

    ends, rows = torch.tensor([2, 5, 6], dtype=torch.int32), [0, 0, 1, 1, 1, 2]
    for mend in (False, True):
        mended(front, mend)
        x = torch.rand(3) + 0.5
        found = rejection_sampler.expand_batch_to_tokens(x, ends, 6)
        assert torch.equal(found, x[rows]) is mend, GONE
    x = torch.tensor([0.0, 0.7, 0.0])
    assert rejection_sampler.expand_batch_to_tokens(x, ends, 6, 0, 1).tolist() == [1, 1, *[x[1].item()] * 3, 1]
    x = torch.tensor([40, 0, 7], dtype=torch.int32)
    assert rejection_sampler.expand_batch_to_tokens(x, ends, 6).tolist() == [40, 40, 0, 0, 0, 7]


def test_top_k_over_no_rows_fails(front: OfflineFront) -> None:
    from vllm.v1.sample import rejection_sampler

    none_NV, k = torch.empty(0, 64), torch.empty(0, dtype=torch.int32)
    mended(front, False)
    with pytest.raises(Exception, match=r"\S"):
        rejection_sampler.apply_top_k_top_p(none_NV, k, None)
    mended(front, True)
    assert rejection_sampler.apply_top_k_top_p(none_NV, k, None).shape == (0, 64)
    kept_NV = rejection_sampler.apply_top_k_top_p(torch.arange(12.0).view(2, 6), torch.tensor([1, 3]), None)
    assert (kept_NV > -torch.inf).sum(-1).tolist() == [1, 3]


def test_a_placeholder_is_accepted_as_a_draft(front: OfflineFront) -> None:
    """Half of the rows hold placeholders, beside rows whose last token is likely; (rows, 2 positions, 5 tokens)."""
    from vllm.v1.sample import rejection_sampler

    rows, law = 4000, torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2])
    drafts_N = torch.tensor([2, 4, -1, -1] * (rows // 2), dtype=torch.int32)
    ends = torch.arange(2, 2 * rows + 1, 2, dtype=torch.int32)
    sampling = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(rows), generators={})
    bonus = torch.full((rows, 1), 3, dtype=torch.int32)
    point_N5 = torch.nn.functional.one_hot(drafts_N.clamp(min=0).long(), 5).float()
    for mend in (False, True):
        mended(front, mend)
        for draft_probs in (None, point_N5):
            logits_N5 = law.log().repeat(2 * rows, 1)
            found = rejection_sampler.rejection_sample(
                drafts_N, [2] * rows, 2, ends, draft_probs, logits_N5, bonus, sampling
            )
            counts = torch.bincount(found[1::2, 0] + 1, minlength=6)
            assert (counts[0] == 0) == mend, GONE
            if mend:
                assert (found[1::2, 1:] == -1).all()
                shares = torch.bincount(found[:, 0], minlength=5) / rows
                assert torch.allclose(shares, law, atol=0.035)
                assert torch.allclose(counts[1:] / (rows / 2), law, atol=0.05)


def test_the_token_after_a_draft_may_not_stop_although_min_tokens_are_there(front: OfflineFront) -> None:
    from vllm.v1.sample.logits_processor import MinTokensLogitsProcessor
    from vllm.v1.sample.sampler import Sampler

    def stops(said: int, drafted: int) -> bool:
        """Whether token 4 may follow so many tokens and drafts, where the least is 5."""
        processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
        processor.min_toks[0] = (5, [1] * said, {4}, False)
        processor.logits_slice = (torch.tensor([0], dtype=torch.int32), torch.tensor([4], dtype=torch.int32))
        sampling = SimpleNamespace(
            bad_words_token_ids={},
            no_penalties=True,
            output_token_ids=[[1] * said],
            spec_token_ids=[[2] * drafted],
            allowed_token_ids_mask=None,
            logitsprocs=SimpleNamespace(non_argmax_invariant=[processor]),
            thinking_budget_state_holder=None,
        )
        found = Sampler().apply_logits_processors(torch.zeros(1, 6), sampling, True)
        assert len(processor.logits_slice[0]) == 1
        return bool(found[0, 4] == 0)

    for mend in (False, True):
        mended(front, mend)
        assert not stops(2, 2)
        assert stops(2, 3) is mend, GONE
        assert stops(4, 3) is mend, GONE


def test_generators_of_the_cpu_have_no_offset_to_set_back(front: OfflineFront) -> None:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    def generator() -> torch.Generator:
        state = CachedRequestState(
            req_id="seeded", prompt_token_ids=[1, 2], mm_features=[], sampling_params=None, block_ids=([],),
            num_computed_tokens=0, output_token_ids=[], generator=torch.Generator("cpu").manual_seed(7),
        )  # fmt: skip
        return state.generator

    mended(front, False)
    seeded = generator()
    with pytest.raises(RuntimeError, match="offset"):
        seeded.set_offset(seeded.get_offset() - 4)
    expected = torch.rand(5, generator=seeded)
    mended(front, True)
    seeded = generator()
    seeded.set_offset(seeded.get_offset() - 4)
    assert torch.equal(torch.rand(5, generator=seeded), expected)


def test_a_weight_update_leaves_a_tied_head_behind(front: OfflineFront, model: Path) -> None:
    for mend, stale in ((False, ["lm_head"]), (True, [])):
        mended(front, mend)
        Weights(front, model).load(1, moved(model, 1 + mend))
        assert front.rpc("paceline_stale", "policy") == [stale], GONE


def test_a_part_of_a_fused_layer_is_filled_up_with_whatever_was_in_memory(front: OfflineFront, model: Path) -> None:
    def packed() -> int:
        return front.rpc("paceline_checksums", "policy")[0]["model.layers.0.self_attn.qkv_proj.packed"]

    name, weights = "model.layers.0.self_attn.q_proj.weight", Weights(front, model)
    new = moved(model, 3)
    for mend in (False, True):
        mended(front, True)
        weights.load(1, new)
        before = packed()
        mended(front, mend)
        litter = [torch.full((192, 64), 9.0) for _ in range(20)]
        del litter
        with pytest.raises(VllmError, match="got a part of its weights") if mend else nullcontext():
            weights._send("start_weight_update", 2, {name: new[name]})
        assert (packed() == before) is mend, GONE


def test_min_p_and_logit_bias_are_not_applied_under_speculation(runner: Any) -> None:
    from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinPLogitsProcessor

    applied = [type(processor) for processor in runner.input_batch.logitsprocs.all]
    assert not {LogitBiasLogitsProcessor, MinPLogitsProcessor} & set(applied), GONE
    for params in (SamplingParams(min_p=0.1), SamplingParams(logit_bias={3: 1.0})):
        for mend in (False, True):
            said = workarounds.refusal(params, speculates=True, mend=mend, allow_lossy=True)
            assert said is not None
            assert f"vLLM {installed()} does not apply it where it speculates" in said
        assert workarounds.refusal(params, speculates=False, mend=True) is None


def test_one_sequence_near_the_limit_stops_the_batch_from_drafting(
    runner: Any, front: OfflineFront
) -> None:  # field I4
    runner.effective_drafter_max_model_len = runner.max_model_len
    near, at_end = SimpleNamespace(max_seq_len=126), SimpleNamespace(max_seq_len=128)
    assert not runner._input_fits_in_drafter(near), GONE
    mended(front, True)
    assert runner._input_fits_in_drafter(near)
    assert runner._input_fits_in_drafter(at_end)


def test_kernels_cannot_be_registered_twice() -> None:
    from vllm.platforms import current_platform

    if "second_engine" not in workarounds.faults_here():
        pytest.skip("this vLLM does not register kernels")
    original = workarounds._replaced["second_engine"][2]
    with pytest.raises(Exception, match=r"\S"):
        original()
    current_platform.register_triton_kernel_overrides()


def test_what_is_not_mended_is_refused_and_only_stamped_where_lossy_is_allowed() -> None:
    hot, cold = SamplingParams(temperature=0.7), SamplingParams(temperature=0.0)
    said = workarounds.refusal(hot, speculates=True, mend=False)
    assert said is not None
    assert said.startswith("temperature=0.7: in vLLM")
    assert "vllm#55005" in said
    assert workarounds.refusal(hot, speculates=True, mend=True) is None
    assert workarounds.refusal(hot, speculates=False, mend=False) is None
    assert workarounds.refusal(cold, speculates=True, mend=False) is None
    assert workarounds.refusal(hot, speculates=True, mend=False, allow_lossy=True) is None
    assert "vLLM's fault expand_batch_to_tokens (vllm#55005)" in workarounds.standing(speculates=True, mend=False)
    assert "vLLM's fault tied_head" in workarounds.standing(speculates=False, mend=False)
    assert workarounds.standing(speculates=True, mend=True) == ()
    for tied, partial in ((True, False), (False, True)):
        said = workarounds.refit_refusal(tied=tied, partial=partial, mend=False)
        assert said is not None
        assert "engine.vllm.mend=true" in said
        assert workarounds.refit_refusal(tied=tied, partial=partial, mend=True) is None
    assert workarounds.refit_refusal(tied=False, partial=False, mend=False) is None
