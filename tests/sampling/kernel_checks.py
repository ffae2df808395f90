"""What the kernels must agree with: each check holds them against the torch code, on the vectors that both share.

Run as a program it prints, as JSON, which checks failed and why; with ``TRITON_INTERPRET=1`` the device may be a CPU.

    TRITON_INTERPRET=1 python tests/sampling/kernel_checks.py cpu
"""

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator

import numpy as np
import torch
import triton
import triton.language as tl
from vectors import TOLERANCE, SoftVector, soft_vectors, vectors

from paceline.sampling import kernels
from paceline.sampling.accept import Acceptance, VerifyRow, accept, chain_parents
from paceline.sampling.kernels import device, launch
from paceline.sampling.keyed import BLOCK, block_logsumexp, draw_candidates, keyed_sample
from paceline.sampling.noise import Purpose, gumbels, philox4x32, signed32, stream, uniforms
from paceline.sampling.processors import Spec
from paceline.sampling.soft import Laws, block_laws, rejection_laws
from paceline.schema import SamplingParams, as_tokens


@contextlib.contextmanager
def served_by(fused: bool) -> Iterator[None]:
    """Within, the dispatch picks the kernels, or the torch code, whatever the device."""
    before = kernels.serve
    kernels.serve = lambda logits: fused
    try:
        yield
    finally:
        kernels.serve = before


@triton.jit
def words_kernel(out_ptr, c0, c1, c2, c3, k0, k1):
    zeros = tl.zeros([2], dtype=tl.uint32)
    lane = tl.arange(0, 2)
    words = device.philox(
        zeros + c0.to(tl.uint32), zeros + c1.to(tl.uint32), zeros + c2.to(tl.uint32), zeros + c3.to(tl.uint32),
        zeros + k0.to(tl.uint32), zeros + k1.to(tl.uint32),
    )  # fmt: skip
    for i in tl.static_range(4):
        tl.store(out_ptr + i * 2 + lane, words[i].to(tl.int64))


@triton.jit(do_not_specialize=["k0", "k1"])
def noise_kernel(bits_ptr, gumbel_ptr, seeds_ptr, positions_ptr, k0, k1, COUNT: tl.constexpr, STREAM: tl.constexpr):
    row = tl.program_id(0)
    index = tl.arange(0, COUNT)
    bits = device.uniform_bits(index, tl.load(positions_ptr + row), tl.load(seeds_ptr + row), k0, k1, STREAM)
    tl.store(bits_ptr + row * COUNT + index, bits)
    tl.store(gumbel_ptr + row * COUNT + index, device.gumbel(bits))


def philox_words_are_the_published_ones(on: torch.device) -> None:
    key = (0xA4093822, 0x299F31D0)
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    out = torch.zeros((4, 2), dtype=torch.int64, device=on)
    words_kernel[(1,)](out, *counter, *key)
    wanted = philox4x32(counter, key)
    assert wanted == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    assert out[:, 1].tolist() == list(wanted), [hex(word) for word in out[:, 1].tolist()]


def uniforms_are_equal_bit_for_bit(on: torch.device) -> None:
    for vector in (vectors()[0], vectors()[-1]):
        for purpose in Purpose:
            n, count = len(vector.seeds_N), 64
            bits = torch.zeros((n, count), dtype=torch.int64, device=on)
            noise = torch.zeros((n, count), dtype=torch.float64, device=on)
            keys = signed32(vector.run_seed), signed32(vector.run_seed >> 32)
            noise_kernel[(n,)](
                bits, noise, vector.seeds_N.to(on), vector.positions_N.to(on), *keys, count, stream(purpose)
            )
            args = vector.run_seed, vector.seeds_N, vector.positions_N, {purpose: count}
            assert torch.equal(bits.cpu().double() * 2.0**-53, uniforms(*args)[0]), f"{vector.name}, {purpose.name}"
            error = float((noise.cpu() - gumbels(*args)[0]).abs().max())
            assert error < 1e-13, f"{vector.name}, {purpose.name}: Gumbel noise is off by {error}"


def the_ends_of_the_unit_interval_give_finite_noise(on: torch.device) -> None:
    """Zero bits and all 53 of them: draws too rare to meet."""
    bits = torch.tensor([0, 1, 2**52, 2**53 - 1], device=on)
    out = torch.zeros(4, dtype=torch.float64, device=on)
    gumbel_kernel[(1,)](bits, out)
    unit = (bits.cpu().double().clamp(min=0.5) * 2.0**-53).neg().log1p().neg().log().neg()
    assert torch.isfinite(out).all(), out
    assert float((out.cpu() - unit).abs().max()) < 1e-13, (out, unit)


@triton.jit
def gumbel_kernel(bits_ptr, out_ptr):
    index = tl.arange(0, 4)
    tl.store(out_ptr + index, device.gumbel(tl.load(bits_ptr + index)))


def block_sums_agree(on: torch.device) -> None:
    for vector in vectors():
        wanted = block_logsumexp(vector.logits_NV)
        found = launch.block_logsumexp(vector.logits_NV.to(on)).cpu()
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        _close(found, wanted, TOLERANCE[wanted.dtype], vector.name)


def block_sums_of_broken_rows_are_not_finite(on: torch.device) -> None:
    """What acceptance reads to refuse a row: NaN, infinite logits, a row without a token; the token stays in range."""
    logits_NV = torch.randn(4, 2 * BLOCK + 3)
    logits_NV[0, 5], logits_NV[1, 300], logits_NV[2] = torch.nan, torch.inf, -torch.inf
    logits_NV[3] = torch.nan
    blocks = launch.block_logsumexp(logits_NV.to(on))
    assert blocks.double().logsumexp(-1).isfinite().tolist() == [False] * 4
    zeros = torch.zeros(4, dtype=torch.int64, device=on)
    token, _ = launch.keyed_sample(logits_NV.to(on), blocks, 0, zeros, zeros)
    assert ((token >= 0) & (token < logits_NV.shape[1])).all(), token


def the_pick_takes_the_references_token(on: torch.device) -> None:
    for vector in vectors():
        blocks_NG = block_logsumexp(vector.logits_NV)
        keys = vector.run_seed, vector.seeds_N, vector.positions_N
        wanted = keyed_sample(vector.logits_NV, blocks_NG, *keys)
        found = launch.keyed_sample(
            vector.logits_NV.to(on), blocks_NG.to(on), keys[0], keys[1].to(on), keys[2].to(on)
        )  # fmt: skip
        _same_sample(found, wanted, 1e-9, vector.name)


def a_row_gives_the_same_bits_in_any_batch(on: torch.device) -> None:
    for vector in vectors()[::9]:
        logits_NV, seeds_N, positions_N = (t.to(on) for t in (vector.logits_NV, vector.seeds_N, vector.positions_N))
        blocks_NG = launch.block_logsumexp(logits_NV)
        token_N, margin_N = launch.keyed_sample(logits_NV, blocks_NG, vector.run_seed, seeds_N, positions_N)
        for n in (0, 2):
            one = slice(n, n + 1)
            # A copy of one row, and every second row of a wider tensor, are laid out otherwise.
            apart = logits_NV[one].clone()
            assert torch.equal(launch.block_logsumexp(apart), blocks_NG[one]), vector.name
            found = launch.keyed_sample(apart, blocks_NG[one], vector.run_seed, seeds_N[one], positions_N[one])
            assert torch.equal(found[0], token_N[one]), vector.name
            assert torch.equal(found[1], margin_N[one]), vector.name
        assert torch.equal(launch.block_logsumexp(logits_NV[::2]), blocks_NG[::2]), vector.name


def draws_without_replacement_agree(on: torch.device) -> None:
    for vector in vectors():
        if vector.logits_NV.dtype != torch.float64:
            continue
        keys = vector.seeds_N, vector.positions_N
        with served_by(False):
            wanted = draw_candidates(vector.logits_NV, vector.run_seed, *keys, 2)
        with served_by(True):
            found = draw_candidates(vector.logits_NV.to(on), vector.run_seed, *(key.to(on) for key in keys), 2)
        assert torch.equal(found.cpu(), wanted), vector.name


def laws_of_rejection_agree(on: torch.device) -> None:
    for case in soft_vectors():
        if not case.has_points:
            wanted = rejection_laws(case.vector.logits_NV, case.soft)
            _same_laws(case, wanted, _fused(case, on, block=False), on, block=False)


def laws_of_block_acceptance_agree(on: torch.device) -> None:
    for case in soft_vectors():
        wanted = block_laws(case.vector.logits_NV, case.soft, case.chain_M, case.depth_M)
        _same_laws(case, wanted, _fused(case, on, block=True), on, block=True)


def whole_verdicts_agree(on: torch.device) -> None:
    """Drawn chains, point masses, trees with siblings, greedy rows and rows without a draft in one pass."""
    generator = torch.Generator().manual_seed(4)
    vocabulary = 2 * BLOCK + 40
    rows = []
    for i in range(6):
        laws = torch.randn(4, vocabulary, dtype=torch.float64, generator=generator)
        tokens = as_tokens(torch.multinomial(laws.softmax(-1), 1, generator=generator)[:, 0].numpy())
        parents = as_tokens([-1, -1, 0, 0]) if i % 6 == 5 else chain_parents(4)
        if i % 6 == 5:
            laws[1], laws[3] = laws[0], laws[2]
            tokens = as_tokens([7, 8, 7, 8])
        law_of = as_tokens([0, -1, 2, 3] if i % 6 == 1 else [0, 0, 2, 2] if i % 6 == 5 else [0, 1, 2, 3])
        spec = Spec(SamplingParams(temperature=0.0 if i % 6 == 2 else 1.0, top_k=50 if i % 6 == 3 else 0))
        drawn = {} if i % 6 == 4 else {"laws": laws, "law_of": law_of}
        rows.append(VerifyRow(str(i), spec, i, as_tokens([0]), as_tokens([]), tokens, parents, **drawn))
    logits_NV = torch.randn(len(rows) * 5, vocabulary, dtype=torch.float64, generator=generator)
    for acceptance in ("rejection", "block"):
        _same_verdicts(logits_NV, rows, acceptance, on, 1e-10)
    # Rows without processors are read in half precision.
    as_they_are = [row for row in rows if row.spec.is_identity]
    _same_verdicts(logits_NV[: 5 * len(as_they_are)].bfloat16(), as_they_are, "rejection", on, 1e-5)


def _same_verdicts(
    logits_NV: torch.Tensor, rows: list[VerifyRow], acceptance: Acceptance, on: torch.device, loss: float
) -> None:
    with served_by(False):
        wanted = accept(logits_NV, rows, 3, acceptance)
    with served_by(True):
        found = accept(logits_NV.to(on), rows, 3, acceptance)
    assert 0 < sum(len(verdict.path) for verdict in wanted) < 4 * len(rows)
    for ours, theirs, row in zip(found, wanted, rows, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist(), f"{acceptance}, row {row.request_id}"
        assert ours.path.tolist() == theirs.path.tolist(), f"{acceptance}, row {row.request_id}"
        for name in ("processed_logprobs", "raw_logprobs", "margins"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=loss, err_msg=name)


CHECKS: tuple[Callable[[torch.device], None], ...] = (
    philox_words_are_the_published_ones,
    uniforms_are_equal_bit_for_bit,
    the_ends_of_the_unit_interval_give_finite_noise,
    block_sums_agree,
    block_sums_of_broken_rows_are_not_finite,
    the_pick_takes_the_references_token,
    a_row_gives_the_same_bits_in_any_batch,
    draws_without_replacement_agree,
    laws_of_rejection_agree,
    laws_of_block_acceptance_agree,
    whole_verdicts_agree,
)


def run_checks(on: torch.device) -> dict[str, str]:
    """Each check by name, with what failed, or nothing."""
    found = {}
    with served_by(False):
        for check in CHECKS:
            try:
                check(on)
                found[check.__name__] = ""
            except Exception:  # noqa: BLE001 -- a check that dies is a check that failed; the rest must run
                found[check.__name__] = traceback.format_exc(limit=-3)
    return found


def _fused(case: SoftVector, on: torch.device, block: bool) -> launch.FusedLaws:
    logits_NV = case.vector.logits_NV.to(on)
    blocks_NG = launch.block_logsumexp(logits_NV)
    if block:
        return launch.block_laws(logits_NV, blocks_NG, case.soft, case.chain_M, case.depth_M)
    return launch.rejection_laws(logits_NV, blocks_NG, case.soft)


def _same_laws(case: SoftVector, wanted: Laws, found: launch.FusedLaws, on: torch.device, block: bool) -> None:
    name = case.vector.name
    exact = wanted.residual_PV.dtype == torch.float64 and case.vector.logits_NV.dtype == torch.float64
    # float32 carries log-probabilities to 1e-6 of the largest logit, and residuals of near laws lose digits with it.
    loss = 1e-11 if exact else 2e-3 if "extreme" in name or "near" in name or "equal" in name else 2e-5
    assert torch.equal(found.parent_P.cpu(), wanted.parent_P), name
    # Where p and q are equal, h inside a chain is 0 / 0; the chain's end decides.
    decides_M = torch.from_numpy(case.depth_M == case.depth_M.max()) if "equal" in name else slice(None)
    accept_error = (found.log_accept_M.cpu().exp() - wanted.log_accept_M.exp())[decides_M].abs().max()
    assert float(accept_error) < loss, f"{name}: acceptance is off by {float(accept_error)}"
    total_P = found.rest_PG.double().logsumexp(-1).cpu()
    for p in range(len(total_P)):
        law_G = block_logsumexp(wanted.residual_PV[p : p + 1].double()).exp()[0]
        rest_G = found.rest_PG[p].double().cpu()
        # The laws are weighed by the mass that is left: where that is rounding alone, so is the law of it.
        weight = min(1.0, float(total_P[p].exp()))
        if weight > 0:
            error = float(weight * ((rest_G - total_P[p]).exp() - law_G).abs().max())
            assert error < loss, f"{name}, node {p}: the residual is off by {error}"
    keys = case.vector.run_seed, case.vector.seeds_N[:1].expand(len(total_P)), torch.arange(len(total_P))
    if block and not exact:
        return
    sample = found.sample(keys[0], keys[1].to(on), keys[2].to(on))
    if exact and "near" not in name and "equal" not in name:
        _same_sample(sample, wanted.sample(*keys), 1e-9, name)
    # Whatever the rounding, what is drawn has a probability.
    p_P = case.vector.logits_NV[wanted.parent_P, sample[0].cpu()]
    assert (p_P > -torch.inf).all(), f"{name}: a token that the policy excludes was drawn"


def _same_sample(
    found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor], sure: float, name: str
) -> None:
    token_N, margin_N = (tensor.cpu() for tensor in found)
    is_sure_N = wanted[1] > sure
    assert torch.equal(token_N[is_sure_N], wanted[0][is_sure_N]), f"{name}: {token_N} is not {wanted[0]}"
    assert torch.allclose(margin_N[is_sure_N], wanted[1][is_sure_N], rtol=1e-9, atol=1e-9), f"{name}: margins"


def _close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, name: str) -> None:
    assert torch.equal(found.isfinite(), wanted.isfinite()), name
    is_finite = wanted.isfinite()
    scale = max(1.0, float(wanted[is_finite].abs().max()))
    error = float((found - wanted)[is_finite].abs().max())
    assert error <= tolerance * scale, f"{name}: off by {error}"


if __name__ == "__main__":
    results = run_checks(torch.device(sys.argv[1]))
    print(json.dumps(results, indent=1))
