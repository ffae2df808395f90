"""Coupled, rejection and block acceptance of the same soft drafts, side by side.

First on pairs of laws at a known total variation d. Theory for one position: rejection keeps 1 - d (Leviathan et al.,
ICML 2023), the most that any scheme can; Gumbel-max with shared noise keeps sum_v 1 / sum_w max(p_w / p_v, q_w / q_v),
which is at least (1 - d) / (1 + d) (Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant
speculative decoding", 2024), with equality where p and q agree or exclude each other at every token. What is emitted
is held against the policy's law by G-tests of first tokens and of pairs.

Then on the text-to-SQL policy of `examples/policies`, with a draft model of one layer that is trained here for about
half a minute of one core, the first time (it stays in paceline's cache), and verified in float64 at a fixed budget of
four depths. Every side drafts from nothing but that model, for the same requests; nothing is said about time.

    python benchmarks/soft_drafts.py [--requests 2000] [--samples 4] [--json FILE]
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.audit.stats import g_test, holm
from paceline.config import BudgetConfig, EngineConfig, PolicyConfig
from paceline.drafters import PolicyTraits
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.hf import HFEngine
from paceline.forward.pretrained import load_pretrained
from paceline.rl.policy import Policy
from paceline.rl.pretrain import BOS, EOS, PAD, save, seeded, train
from paceline.rl.tasks.chinook import database
from paceline.rl.tasks.chinook_questions import questions
from paceline.rl.tasks.data import cache_dir
from paceline.rl.tasks.split import split_of
from paceline.rl.tasks.text_to_sql import TextToSql, phrase
from paceline.sampling.accept import VerifyRow, accept, chain_parents
from paceline.sampling.keyed import coupled_candidates, draw_candidates
from paceline.sampling.noise import draft_position
from paceline.sampling.processors import Spec
from paceline.schema import RolloutRequest, SamplingParams, as_tokens, derive_seed

DISTANCES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
VOCABULARIES = (8, 50, 200)
MODES = ("coupled", "rejection", "block")
DEPTH = 4
POLICY = Path(__file__).parents[1] / "examples" / "policies" / "sql-1m"
DRAFT_STEPS, ROWS_PER_STEP = 200, 16
SIDES = (("coupled", 1), ("rejection", 1), ("block", 1), ("coupled", 3), ("rejection", 3))


# Laws at a distance


def excluded(vocabulary, d, rng):
    """Equal on a part of the vocabulary, each alone on another: the worst case of shared noise."""
    shared = rng.dirichlet(np.ones(vocabulary // 2)) * (1 - d)
    alone = vocabulary // 4
    p, q = np.zeros(vocabulary), np.zeros(vocabulary)
    p[: len(shared)] = q[: len(shared)] = shared
    p[len(shared) : len(shared) + alone] = rng.dirichlet(np.ones(alone)) * d
    q[len(shared) + alone : len(shared) + 2 * alone] = rng.dirichlet(np.ones(alone)) * d
    return p, q


def moved(vocabulary, d, rng):  # noqa: ARG001
    """A Zipf law whose head loses the mass d to its tail, each token of a side by the same share."""
    p = 1 / np.arange(1, vocabulary + 1)
    p /= p.sum()
    head = np.searchsorted(p.cumsum(), d) + 1
    change = np.zeros(vocabulary)
    change[:head], change[head:] = -d * p[:head] / p[:head].sum(), d * p[head:] / p[head:].sum()
    return p, p + change


def noisy(vocabulary, d, rng):
    """Normal logits, and the same with normal noise whose size makes the distance."""
    logits, noise = 1.5 * rng.normal(size=vocabulary), rng.normal(size=vocabulary)
    p = softmax(logits)
    # The noise favours the rarest token most, so that every distance can be had.
    noise[p.argmin()] = np.abs(noise).max() + 1
    low, high = 0.0, 200.0
    for _ in range(100):
        middle = (low + high) / 2
        far = np.abs(p - softmax(logits + middle * noise)).sum() / 2 > d
        low, high = (low, middle) if far else (middle, high)
    return p, softmax(logits + low * noise)


SHAPES = {"excluded": excluded, "moved": moved, "noisy": noisy}


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def shared_noise_keeps(p, q):
    """With which probability argmax(log p + G) equals argmax(log q + G)."""
    both = np.flatnonzero((p > 0) & (q > 0))
    return sum(1 / np.maximum(p / p[v], q / q[v]).sum() for v in both)


def verify(p, q, mode, count, seed):
    """Verdicts of ``count`` requests, each with a chain of ``DEPTH`` drafted from q, and their first two tokens."""
    # A policy's logits are finite; the exponential of these is 0.
    p_V, q_V = (torch.from_numpy(np.log(np.maximum(law, 1e-300)) - 400 * (law == 0)) for law in (p, q))
    seeds = torch.arange(count)
    drafted = torch.empty((count, DEPTH), dtype=torch.int64)
    for depth in range(DEPTH):
        at = torch.full((count,), depth if mode == "coupled" else draft_position(0, depth - 1))
        sample = coupled_candidates if mode == "coupled" else draw_candidates
        drafted[:, depth] = sample(q_V.expand(count, -1), seed, seeds, at, 1)[:, 0]
    laws = {} if mode == "coupled" else {"laws": q_V[None], "law_of": as_tokens(np.zeros(DEPTH))}
    spec, prompt, parents = Spec(SamplingParams()), as_tokens([0]), chain_parents(DEPTH)
    rows = [
        VerifyRow(str(i), spec, i, prompt, as_tokens([]), as_tokens(drafted[i]), parents, **laws) for i in range(count)
    ]
    verdicts = accept(p_V.expand(count * (1 + DEPTH), -1), rows, seed, mode)
    # Where a pass emitted one token, the next one emits the second.
    short = [i for i, verdict in enumerate(verdicts) if len(verdict.tokens) == 1]
    later = [
        VerifyRow(str(i), spec, i, prompt, verdicts[i].tokens, as_tokens([]), as_tokens([])) for i in short
    ]  # fmt: skip
    seconds = dict(zip(short, accept(p_V.expand(len(short), -1), later, seed, mode), strict=True)) if short else {}
    pairs = [
        (int(v.tokens[0]), int(seconds[i].tokens[0] if i in seconds else v.tokens[1])) for i, v in enumerate(verdicts)
    ]
    return [len(verdict.path) for verdict in verdicts], np.array(pairs)


def toy_cell(shape, vocabulary, d, count):
    """One pair of laws under the three modes."""
    seed = derive_seed(shape, vocabulary, d) >> 1
    p, q = SHAPES[shape](vocabulary, d, np.random.default_rng(seed))
    distance = np.abs(p - q).sum() / 2
    assert abs(distance - d) < 1e-6, (shape, vocabulary, d, distance)
    cell = {"shape": shape, "vocabulary": vocabulary, "d": d, "coupled_exact": shared_noise_keeps(p, q)}
    for mode in MODES:
        kept, pairs = verify(p, q, mode, count, seed)
        tested = sum(min(k + 1, DEPTH) for k in kept)
        cell[mode] = {
            "acceptance": sum(kept) / tested,
            "tokens_a_pass": 1 + float(np.mean(kept)),
            "p_first": g_test(np.bincount(pairs[:, 0], minlength=vocabulary), p).p_value,
            "p_pairs": g_test(
                np.bincount(pairs[:, 0] * vocabulary + pairs[:, 1], minlength=vocabulary**2), np.outer(p, p).ravel()
            ).p_value,
        }
    return cell


def toy_table(cells):
    names = ["laws", "d", "coupled", "exact", "(1-d)/(1+d)", "rejection", "1-d"]
    names += ["tokens: coupled", "rejection", "theory", "block"]
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for shape in SHAPES:
        for d in DISTANCES:
            own = [cell for cell in cells if (cell["shape"], cell["d"]) == (shape, d)]

            def mean(mode, what, own=own):
                return np.mean([cell[mode][what] for cell in own])

            exact, theory = np.mean([c["coupled_exact"] for c in own]), sum((1 - d) ** i for i in range(DEPTH + 1))
            print(
                f"| {shape} | {d:g} | {mean('coupled', 'acceptance'):.3f} | {exact:.3f} | {(1 - d) / (1 + d):.3f} | "
                f"{mean('rejection', 'acceptance'):.3f} | {1 - d:.3f} | {mean('coupled', 'tokens_a_pass'):.2f} | "
                f"{mean('rejection', 'tokens_a_pass'):.2f} | {theory:.2f} | {mean('block', 'tokens_a_pass'):.2f} |"
            )
    values = np.array([cell[mode][key] for cell in cells for mode in MODES for key in ("p_first", "p_pairs")])
    print(
        f"\n{len(values)} G-tests against the policy's law: smallest p-value {values.min():.2g}, "
        f"{holm(values).min():.2g} after Holm's correction; {np.mean(values < 0.05):.1%} below .05"
    )


# A real draft model


def draft_model(tokenizer):
    """The small model, from the cache or trained now as the policy was."""
    home = cache_dir() / "benchmarks" / f"sql-draft-{DRAFT_STEPS}"
    if not (home / "config.json").is_file():
        rng = seeded(1)
        known = [question for question in questions(database()) if split_of(question.key) == "train"]
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=tokenizer.model_max_length,
            tie_word_embeddings=True, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
        )  # fmt: skip
        model = LlamaForCausalLM(config)

        def draw():
            return [(question.text, phrase(question, rng)) for question in rng.choices(known, k=ROWS_PER_STEP)]

        train(model, tokenizer, draw, DRAFT_STEPS, progress=lambda step, loss: print(f"step {step}: loss {loss:.3f}"))
        save(model, tokenizer, home)
    return load_pretrained(home, "draft model", str(home), "float64")


class Watched:
    """A drafter whose drafts are counted: of the depths that were tested, how many were kept."""

    def __init__(self, drafter):
        self.drafter, self.depths = drafter, {}
        self.tested, self.kept = np.zeros(DEPTH, dtype=int), np.zeros(DEPTH, dtype=int)
        self.start, self.finish, self.on_weights = drafter.start, drafter.finish, drafter.on_weights

    def propose(self, request_ids, budget):
        drafts = self.drafter.propose(request_ids, budget)
        for draft in drafts:
            self.depths[draft.request_id] = -(-len(draft.tokens) // self.drafter.width)
        return drafts

    def commit(self, outcomes):
        for outcome in outcomes:
            depth = self.depths.pop(outcome.request_id, 0)
            # Behind the end of a response nothing is tested.
            tested = outcome.accepted + (outcome.accepted < min(depth, len(outcome.tokens)))
            self.tested[:tested] += 1
            self.kept[: outcome.accepted] += 1
        self.drafter.commit(outcomes)


def generate(policy, requests, drafter=None, budget=0, acceptance="coupled"):
    engine = HFEngine(
        policy.engine_model(), drafter=drafter, budget=budget, budget_config=BudgetConfig(mode="fixed"),
        config=EngineConfig(acceptance=acceptance), eos_ids=policy.eos_ids,
    )  # fmt: skip
    rollouts, stats = engine.generate(requests), engine.stats()
    engine.close()
    return [rollout.tokens.tolist() for rollout in rollouts], stats


def measure_model(samples):
    policy = Policy.load(PolicyConfig(path=str(POLICY), dtype="float64"), 0)
    small = draft_model(policy.tokenizer)
    print(f"policy {policy.model.num_parameters():,} parameters, draft model {small.num_parameters():,}\n")
    prompts = [policy.encode_prompt(prompt.text) for prompt in TextToSql(train_prompts=32).prompts("train")]
    names = "temperature,acceptance,width,tokens/forward,kept at depth 1,at 2,at 3,at 4,rollouts unlike plain"
    print("| " + names.replace(",", " | ") + " |\n" + "|---" * (names.count(",") + 1) + "|")
    rows = []
    for temperature in (0.7, 1.0):
        requests = [
            RolloutRequest(
                request_id=f"{i}/{sample}",
                prompt=prompt,
                group=str(i),
                params=SamplingParams(temperature=temperature, max_tokens=96, seed=derive_seed(i, sample)),
            )
            for i, prompt in enumerate(prompts)
            for sample in range(samples)
        ]
        plain, _ = generate(policy, requests)
        for acceptance, width in SIDES:
            traits = PolicyTraits(
                vocabulary_size=len(policy.tokenizer), run_seed=0, eos_ids=policy.eos_ids, acceptance=acceptance
            )
            drafter = Watched(DraftModelDrafter(small, traits, width=width))
            said, stats = generate(policy, requests, drafter, DEPTH * width, acceptance)
            drafter.drafter.close()
            row = {
                "temperature": temperature,
                "acceptance": acceptance,
                "width": width,
                "tokens_per_forward": stats.tokens_emitted / stats.row_forwards,
                "kept_at_depth": (drafter.kept / drafter.tested).tolist(),
                "tested": drafter.tested.tolist(),
                "rollouts": len(plain),
                "unlike_plain": sum(a != b for a, b in zip(said, plain, strict=True)),
            }
            rows.append(row)
            kept = " | ".join(f"{share:.1%}" for share in row["kept_at_depth"])
            print(
                f"| {temperature:g} | {acceptance} | {width} | {row['tokens_per_forward']:.2f} | {kept} | "
                f"{row['unlike_plain']} of {len(plain)} |",
                flush=True,
            )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="for each pair of laws and mode")
    parser.add_argument("--samples", type=int, default=4, help="for each of 32 prompts")
    parser.add_argument("--json")
    args = parser.parse_args()
    cells = [toy_cell(shape, v, d, args.requests) for shape in SHAPES for v in VOCABULARIES for d in DISTANCES]
    toy_table(cells)
    print()
    rows = measure_model(args.samples)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"laws": cells, "draft_model": rows}, file, indent=1)


if __name__ == "__main__":
    main()
