"""History, a model that drafts, and both together: tokens a forward by epoch, at a fixed budget of 16 nodes.

Three runs. `sql-1m`: the text-to-SQL policy of `examples/policies` decodes 16 prompts four times over, 8 samples each
at temperature 1, on the reference engine in float32 under coupled acceptance, with an EAGLE-3 head that was trained on
its rollouts of other prompts; the rollouts of all sides should be equal. `bfcl_smollm2`: a recorded run
(`benchmarks/traces`) is replayed, what was said there being what is emitted; SmolLM2-135M with the adapter of
`examples/adapters` computes the hidden states along it, and its EAGLE-3 head was trained on epoch 0, so epochs 1 to 3
count. `chinook_tiny1M_diverse`: another recorded run, whose policy is not at hand; a draft model of two layers was
trained on epochs 0 and 1, so it takes part from epoch 2 on. The noise of a recorded run is not known, so there the
model drafts greedily. All that is trained is trained here, in some minutes of one core, and nothing is said about time.
Beside history the model drafts three children a node: leaves cost it no pass.

    OMP_NUM_THREADS=1 python benchmarks/hybrid.py [--traces sql-1m bfcl_smollm2 chinook_tiny1M_diverse] [--quick]
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.config import BudgetConfig, CotrainConfig, HeadConfig, PolicyConfig
from paceline.cotrain.documents import Document
from paceline.cotrain.taps import Collector
from paceline.cotrain.trainer import Trainer
from paceline.drafters import HistoryDrafter, HybridDrafter, PolicyTraits
from paceline.drafters.base import Seen
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.head import HeadDrafter
from paceline.drafters.heads import make_head
from paceline.engines.hf import HFEngine
from paceline.history import Settings
from paceline.rl.policy import Policy
from paceline.rl.scoring import Scorer
from paceline.rl.tasks.text_to_sql import TextToSql
from paceline.schema import RolloutRequest, SamplingParams, derive_seed
from paceline.simulate.logs import read_steps
from paceline.simulate.replay import Replay

HERE = Path(__file__).parent
BUDGET, TEMPERATURE = 16, 1.0
SIDES = ("history", "model", "hybrid")
#: What a document keeps of its prompt for training; a head needs little of what is far away.
CONTEXT = 48


def traits(policy, vocabulary):
    return PolicyTraits(
        vocabulary_size=vocabulary, run_seed=0, eos_ids=() if policy is None else policy.eos_ids, acceptance="coupled"
    )


# Heads


def documents(policy, pairs, layers):
    """What a head learns from and drafts by: the policy's states along (prompt, response) pairs."""
    collector, scorer = Collector(policy.model, layers), Scorer(policy.model)
    with torch.no_grad():
        for first in range(0, len(pairs), 64):
            prompts, responses = zip(*pairs[first : first + 64], strict=True)
            scorer.logprobs(prompts, responses, TEMPERATURE, collector)
    collector.close()
    return collector.documents()


def shortened(document):
    start = max(document.prompt_length - CONTEXT, 0)
    return Document(
        document.tokens[start:], document.prompt_length - start, document.states_PS[start:], document.final_PH[start:]
    )


def trained_head(policy, pairs, vocabulary, updates):
    """An EAGLE-3 head after ``updates`` steps over the rollouts, each of a quarter of them."""
    counts = np.bincount(np.concatenate([response for _, response in pairs]), minlength=len(policy.tokenizer))
    head = make_head("eagle3", HeadConfig(vocabulary=vocabulary), policy.model, 0, counts)
    texts = [shortened(document) for document in documents(policy, pairs, head.taps)]
    config = CotrainConfig(updates=4, lr=1e-3, passes=3, tokens=0, schedule="cosine", schedule_steps=updates)
    trainer = Trainer(head, policy.model, config, TEMPERATURE)
    for _ in range(updates // 4):
        metrics = trainer.train(texts)
    print(f"head: {sum(p.numel() for p in head.parameters()):,} parameters, {len(texts)} rollouts, {updates} updates: "
          f"loss {metrics['loss']:.3f}, overlap {metrics['overlap_1']:.3f}", file=sys.stderr)  # fmt: skip
    return head.requires_grad_(False)


class Forced:
    """Drafts by the hidden states that a policy has at a recorded text: the inner drafter sees them as an engine's."""

    def __init__(self, inner, states):
        self.inner, self.states = inner, states
        self.length, self.seen, self.prompts = {}, {}, {}
        self.finish, self.on_weights = inner.finish, inner.on_weights

    def start(self, requests):
        for request in requests:
            self.length[request.request_id], self.seen[request.request_id] = len(request.prompt), 0
        self.inner.start(requests)

    def propose(self, names, budget):
        if hasattr(self.inner, "observe"):
            ends = {name: self.length[name] - 1 for name in names}
            self.inner.observe([Seen(n, self.seen[n], self.states[n][self.seen[n] : ends[n]]) for n in names])
            self.seen |= ends
        return self.inner.propose(names, budget)

    def commit(self, outcomes):
        for outcome in outcomes:
            self.length[outcome.request_id] += len(outcome.tokens)
        self.inner.commit(outcomes)


# Runs


def sql(quick):
    """The engine itself, coupled."""
    prompts, samples, epochs = (4, 2, 2) if quick else (16, 8, 4)
    policy = Policy.load(PolicyConfig(path=str(HERE.parent / "examples" / "policies" / "sql-1m")), 0)
    texts = [policy.encode_prompt(prompt.text) for prompt in TextToSql(train_prompts=4 * prompts).prompts("train")]

    def requests(chosen, epoch, count):
        return [
            RolloutRequest(
                request_id=f"{epoch}/{index}/{sample}",
                prompt=prompt,
                group=f"{epoch}/{index}",
                params=SamplingParams(
                    temperature=TEMPERATURE, max_tokens=96, seed=derive_seed(index, epoch, sample)
                ),
            )
            for index, prompt in chosen
            for sample in range(count)
        ]  # fmt: skip

    def decoded(drafter, wanted):
        engine = HFEngine(
            policy.engine_model(), drafter=drafter, budget=BUDGET, budget_config=BudgetConfig(mode="fixed"),
            eos_ids=policy.eos_ids,
        )  # fmt: skip
        said, found = [], {}
        for epoch, part in enumerate(wanted):
            before = engine.stats()
            said += [rollout.tokens.tolist() for rollout in engine.generate(part)]
            after = engine.stats()
            found[epoch] = (after.tokens_emitted - before.tokens_emitted) / (after.row_forwards - before.row_forwards)
        assert not after.events.get("drafter_lost"), after.events
        engine.close()
        return said, found

    numbered = list(enumerate(texts))
    others = requests(numbered[prompts:], "other", samples)
    answers, _ = decoded(None, [others])
    pairs = [
        (request.prompt, np.array(answer, np.int32))
        for request, answer in zip(others, answers, strict=True)
        if len(answer) > 1
    ]
    head = trained_head(policy, pairs, 0, 8 if quick else 240)
    wanted = [requests(numbered[:prompts], epoch, samples) for epoch in range(epochs)]
    plain, _ = decoded(None, wanted)
    table, model = {}, traits(policy, len(policy.tokenizer))
    memory = Settings(patient=True)
    drafters = {
        "history": HistoryDrafter(memory, salt=0),
        "model": HeadDrafter(head, model),
        "hybrid": HybridDrafter(HistoryDrafter(memory, salt=0), HeadDrafter(head, model, width=3)),
    }
    for side, drafter in drafters.items():
        said, table[side] = decoded(drafter, wanted)
        unlike = sum(a != b for a, b in zip(said, plain, strict=True))
        print(f"sql-1m, {side}: {unlike} of {len(plain)} rollouts unlike plain decoding", file=sys.stderr)
    return table, 0


class Joined:
    """History alone while the run is one that the model was trained on, then whatever ``make`` puts around it."""

    def __init__(self, history, make):
        self.inner, self.make = history, make

    def join(self):
        self.inner = self.make(self.inner)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def replayed(run, first, make_model, policy=None, states=None):
    """Tokens a forward by epoch, from epoch ``first`` on; before that a model would be told what it learned from."""

    def around(drafter):
        if policy is None:
            return drafter
        if hasattr(drafter, "attach"):
            drafter.attach(policy.model)
        return Forced(drafter, states)

    table = {}
    for side in SIDES:
        make = {
            "history": lambda history: history,
            "model": lambda _: around(make_model(1)),
            "hybrid": lambda history: around(HybridDrafter(history, make_model(3))),
        }[side]
        drafter = Joined(HistoryDrafter(Settings(patient=True), salt=0), make)
        replay = Replay(drafter, BUDGET)
        for number, step in enumerate(run):
            if step.rollouts[0].epoch >= first > run[max(number - 1, 0)].rollouts[0].epoch:
                drafter.join()
            requests = [
                replace(request, params=SamplingParams(temperature=0.0, max_tokens=len(recorded.tokens) + 1))
                for request, recorded in zip(step.requests(), step.rollouts, strict=True)
            ]
            replay.play(step, requests)
        epochs = replay.result().by_epoch
        table[side] = {int(epoch): found.tokens_per_forward for epoch, found in epochs.items()}
    return table


def recorded_run(name, quick, known):
    """The steps of a trace; a quick look takes a part of the first ones and of those that are replayed."""
    run = list(read_steps(HERE / "traces" / f"{name}.jsonl", None, print))
    if not quick:
        return run
    return [step for epoch in range(known + 1) for step in [s for s in run if s.rollouts[0].epoch == epoch][:1]]


def pairs_of(steps):
    return [(r.prompt, r.tokens) for step in steps for r in step.rollouts if len(r.tokens) > 1]


def bfcl(quick):
    """A head of the policy, on recorded tokens."""
    run = recorded_run("bfcl_smollm2", quick, 1)
    policy = Policy.load(PolicyConfig(path=str(HERE.parent / "examples" / "adapters" / "function_call")), 0)
    learned = pairs_of(step for step in run if step.rollouts[0].epoch == 0)
    head = trained_head(policy, learned[: 8 if quick else None], 2048, 4 if quick else 96)
    states = {}
    for step in run:
        names = [request.request_id for request in step.requests()]
        texts = documents(policy, [(r.prompt, r.tokens) for r in step.rollouts], head.taps)
        kept = [name for name, r in zip(names, step.rollouts, strict=True) if len(r.tokens) > 1]
        states |= {name: text.states_PS for name, text in zip(kept, texts, strict=True)}
        # A response of one token is drafted for by its prompt alone, which no document holds.
        assert len(kept) == len(names), "a response of one token"
    model = traits(policy, len(policy.tokenizer))
    return replayed(run, 1, lambda width: HeadDrafter(head, model, width=width), policy, states), 1


def chinook(quick):
    """A draft model, on recorded tokens."""
    run = recorded_run("chinook_tiny1M_diverse", quick, 2)
    learned = pairs_of(step for step in run if step.rollouts[0].epoch < 2)
    size = 1 + max(int(max(r.prompt.max(), r.tokens.max())) for step in run for r in step.rollouts)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
            pad_token_id=0, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rng = np.random.default_rng(0)
    for _ in range(10 if quick else 300):
        part = [learned[n] for n in rng.integers(0, len(learned), 32)]
        longest = max(len(prompt) + len(said) for prompt, said in part)
        ids, labels = torch.zeros((32, longest), dtype=torch.int64), torch.full((32, longest), -100)
        for n, (prompt, said) in enumerate(part):
            text = torch.from_numpy(np.concatenate([prompt, said]).astype(np.int64))
            ids[n, : len(text)] = text
            labels[n, len(prompt) : len(text)] = text[len(prompt) :]
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    print(f"draft model: {model.num_parameters():,} parameters, loss {loss.item():.3f}", file=sys.stderr)
    model.eval().requires_grad_(False)
    made = []

    def draft_model(width):
        for other in made:
            other.close()
        made.append(DraftModelDrafter(model, traits(None, size), width=width))
        return made[-1]

    return replayed(run, 2, draft_model), 2


TRACES = {"sql-1m": sql, "bfcl_smollm2": bfcl, "chinook_tiny1M_diverse": chinook}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--quick", action="store_true", help="a small part, to see that it runs")
    parser.add_argument("--json")
    args = parser.parse_args()
    results = {}
    print("| run | epoch | history | model | hybrid | over the better |\n|---|---|---|---|---|---|")
    for name in args.traces:
        table, first = TRACES[name](args.quick)
        results[name] = table
        epochs = [epoch for epoch in sorted(table["history"]) if epoch >= first]
        for epoch in epochs:
            row(name, epoch, [table[side][epoch] for side in SIDES])
        # Tokens are the same for all sides, so this is the mean over forwards.
        row(name, "all", [len(epochs) / sum(1 / table[side][epoch] for epoch in epochs) for side in SIDES])
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


def row(name, epoch, values):
    history, model, hybrid = values
    print(f"| {name} | {epoch} | {history:.2f} | {model:.2f} | {hybrid:.2f} | {hybrid / max(history, model):.2f} |")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
