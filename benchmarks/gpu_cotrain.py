"""EAGLE-3 beside a policy that fills a GPU: one script, eight minutes at most, nothing downloaded.

A policy of the shape of Qwen3-0.6B is taught for a minute to put a list of facts into sentences (one of several for
each fact, so that there is something to sample), which also is the task: what is rewarded are facts that are said, and
said right. A head learns from its rollouts on some prompts and drafts for others. Measured are the seconds of a GRPO
step by phase, plainly and with 1 to 7 drafted tokens, and the head's training: tokens a second, peak memory, refit. On
CUDA in bfloat16; with ``--tiny``, and where there is no GPU, the same code runs on the CPU, tiny.

    python benchmarks/gpu_cotrain.py [--shape 0.6b|1.7b] [--batches 64,256,16] [--seconds 480] [--json FILE]
    python benchmarks/gpu_cotrain.py --tiny
"""

import argparse
import json
import random
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from paceline.config import (
    BudgetConfig,
    Config,
    CotrainConfig,
    DrafterConfig,
    EngineConfig,
    HeadConfig,
    PolicyConfig,
    RLConfig,
    SentinelConfig,
)
from paceline.cotrain.taps import Collector
from paceline.cotrain.trainer import Trainer
from paceline.drafters.heads import make_head
from paceline.forward.optimiser import Optimiser
from paceline.report.metrics import accept_histogram
from paceline.rl.batch import Batch
from paceline.rl.engine import make_engine
from paceline.rl.learner import Learner
from paceline.rl.policy import Policy
from paceline.rl.pretrain import BOS, EOS, PAD, batch, make_tokenizer, seeded
from paceline.schema import RolloutRequest, SamplingParams, derive_seed

CONTEXT = 512
COLOURS = ("red", "green", "blue", "white", "black", "yellow", "grey", "brown")
THINGS = ("lamps", "chairs", "books", "plates", "coats", "clocks", "boxes", "shoes", "pens", "keys", "maps", "bells")
SAYINGS = (
    "there are {count} {colour} {thing} in crate {crate}.",
    "crate {crate} holds {count} {colour} {thing}.",
    "in crate {crate} we found {thing} that are {colour}, {count} of them.",
    "{count} {thing}, all {colour}, lie in crate {crate}.",
)


@dataclass(frozen=True)
class Shape:
    """The policy, how many facts a prompt lists, and how much is trained and sampled.

    ``rows`` answers are a step of the policy's schooling; the head learns ``epochs`` times from ``documents`` rollouts;
    ``prompts`` with 8 rollouts each make up a measured step.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    vocabulary: int
    tokens: int
    facts: int
    rows: int
    lr: float
    policy_seconds: float
    documents: int
    epochs: int
    prompts: int
    draft_vocabulary: int


SHAPES = {
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151936, 4096, 8, 64, 3e-4, 75, 1024, 4, 32, 4096),
    "1.7b": Shape(2048, 28, 16, 8, 128, 6144, 151936, 4096, 8, 64, 2e-4, 120, 1024, 4, 32, 4096),
    "tiny": Shape(64, 2, 2, 1, 32, 128, 512, 384, 2, 8, 3e-3, 6, 16, 2, 1, 128),
}
DEPTHS = (1, 2, 3, 5, 7)


class Task:
    """Prompts that list facts, and answers that say them."""

    def __init__(self, facts, seed):
        self.facts, self.rng = facts, random.Random(seed)

    def draw(self):
        """Facts of a prompt: (crate, count, colour, thing)."""
        crates = self.rng.sample(range(10, 100), self.facts)
        return [(c, self.rng.randrange(2, 60), self.rng.choice(COLOURS), self.rng.choice(THINGS)) for c in crates]

    def pair(self):
        """A prompt and one of its answers."""
        facts = self.draw()
        said = [self.rng.choice(SAYINGS).format(**named(fact)) for fact in facts]
        return prompt_of(facts), " ".join(said)


def named(fact):
    return dict(zip(("crate", "count", "colour", "thing"), fact, strict=True))


def prompt_of(facts):
    return "; ".join(f"crate {crate}: {count} {colour} {thing}" for crate, count, colour, thing in facts)


def reward(facts, text):
    """The share of facts that the text says, and half of it for saying as many sentences as there are facts."""
    right = sum(any(saying.format(**named(fact)) in text for saying in SAYINGS) for fact in facts)
    return (right + min(text.count("."), len(facts))) / (2 * len(facts))


class Bench:
    """What the parts share: the policy, its task, where it runs and how much time is left."""

    def __init__(self, shape, device, seconds):
        self.shape, self.device, self.started, self.seconds = shape, device, time.perf_counter(), seconds
        self.dtype = "bfloat16" if device == "cuda" else "float32"
        rng = seeded(0)
        self.task = Task(shape.facts, rng.random())
        texts = [text for _ in range(2000) for text in self.task.pair()]
        tokenizer = make_tokenizer(texts, shape.tokens, CONTEXT)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.hidden,
                num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
                head_dim=shape.head_size, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
                pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
            )
        )  # fmt: skip
        model.to(device=device, dtype=getattr(torch, self.dtype))
        self.policy = Policy(model, tokenizer, PolicyConfig(dtype=self.dtype, device=device))
        self.results = {"shape": asdict(shape), "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}

    def left(self):
        """Seconds until the script must be done."""
        return self.seconds - (time.perf_counter() - self.started)

    def now(self):
        """The time, when all that was asked of the device is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def timed(self, name):
        """Seconds of what happens within, and the most memory that it held, into ``results``."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = self.now()
        own = self.results.setdefault(name, {})
        yield own
        own["seconds"] = self.now() - started
        if self.device == "cuda":
            own["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in own.items()), flush=True)

    def config(self, slots, depth=0, mode="fixed"):
        """Of a run with this many rows at a time and drafted tokens a pass."""
        shape = self.shape
        head = HeadConfig(init="random", dtype=self.dtype, vocabulary=shape.draft_vocabulary)
        return Config(
            drafter=DrafterConfig(kind="eagle3" if depth else "none", budget=depth or 1, head=head),
            budget=BudgetConfig(mode=mode),
            engine=EngineConfig(
                slots=slots, max_batched_tokens=max(8192, 8 * slots), sentinel=SentinelConfig(canaries=0, gap=1000)
            ),
        )

    def requests(self, prompts, samples, visit):
        """Requests for new prompts, and the facts that each lists."""
        listed = [self.task.draw() for _ in range(prompts)]
        encoded = [self.policy.encode_prompt(prompt_of(facts)) for facts in listed]
        requests = [
            RolloutRequest(
                request_id=f"{visit}/{place}/{sample}",
                prompt=prompt,
                group=f"{visit}/{place}",
                params=SamplingParams(max_tokens=32 * self.shape.facts, seed=derive_seed(visit, place, sample)),
            )
            for place, prompt in enumerate(encoded)
            for sample in range(samples)
        ]
        return requests, [facts for facts in listed for _ in range(samples)]


def teach(bench):
    """The policy learns the language of the task."""
    model, shape = bench.policy.model, bench.shape
    optimiser = Optimiser(model.named_parameters(), shape.lr, warmup_steps=20)
    with bench.timed("policy") as own:
        started, tokens, steps, loss = bench.now(), 0, 0, None
        while bench.now() - started < shape.policy_seconds:
            rows = [bench.task.pair() for _ in range(shape.rows)]
            ids_BT, mask_BT, labels_BT = (part.to(bench.device) for part in batch(rows, bench.policy.tokenizer, True))
            loss = model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT).loss
            loss.backward()
            optimiser.step()
            tokens, steps = tokens + int(mask_BT.sum()), steps + 1
        own |= {"steps": steps, "tokens_per_second": tokens / (bench.now() - started), "loss": float(loss.detach())}


def documents_of(bench, requests, responses, head):
    """What the log-probability pass tells a head, in parts of 64 rollouts."""
    collector = Collector(bench.policy.model, head.taps)
    try:
        with torch.no_grad():
            for at in range(0, len(requests), 64):
                prompts = [request.prompt for request in requests[at : at + 64]]
                bench.policy.logprobs(prompts, responses[at : at + 64], 1.0, collector)
    finally:
        collector.close()
    return collector.documents()


def school(bench):
    """The head learns from rollouts of the policy; returns it with its trainer."""
    shape, policy = bench.shape, bench.policy
    requests, _ = bench.requests(shape.documents // 8, 8, "school")
    engine = make_engine(bench.config(256), policy, Path("unused"), False)
    with bench.timed("rollouts for the head") as own:
        responses = [rollout.tokens for rollout in engine.generate(requests)]
        own["tokens"] = sum(map(len, responses))
    engine.close()
    counts = torch.bincount(
        torch.cat([torch.from_numpy(tokens).long() for tokens in responses]), minlength=shape.vocabulary
    ).numpy()
    config = HeadConfig(init="random", dtype=bench.dtype, vocabulary=shape.draft_vocabulary)
    head = make_head("eagle3", config, policy.model, 0, counts)
    with bench.timed("taps") as own:
        documents = documents_of(bench, requests, responses, head)
        own["tokens"] = sum(len(document.tokens) for document in documents)
    updates = max(1, len(documents) // 32)
    cotrain = CotrainConfig(updates=updates, microbatch_tokens=16384, lr=1e-3, warmup_steps=4)
    trainer = Trainer(head, policy.model, cotrain, 1.0)
    with bench.timed("head") as own:
        started, tokens = bench.now(), 0
        for epoch in range(shape.epochs):
            random.Random(epoch).shuffle(documents)
            found = trainer.train(documents)
            tokens += int(found["tokens"])
        own |= {"tokens_per_second": tokens / (bench.now() - started), "loss": found["loss"]}
        own["overlap_1"] = found["overlap_1"]
    return head, trainer


def learn(bench, trainer, engine, requests, facts):
    """The phases of a step other than generation, each with its seconds; ``engine`` has drafted for it."""
    policy, rollouts = bench.policy, engine.generate(requests)
    seconds, at = {}, bench.now()

    def lap(phase):
        nonlocal at
        seconds[phase], at = bench.now() - at, bench.now()

    rewards = [reward(own, policy.decode(r.tokens)) for own, r in zip(facts, rollouts, strict=True)]
    lap("data")
    documents = documents_of(bench, requests, [rollout.tokens for rollout in rollouts], trainer.model)
    lap("logprob")
    learner = Learner(policy, RLConfig(lr=1e-6, microbatch_tokens=16384), 1.0)
    prompts, groups = [request.prompt for request in requests], [request.group for request in requests]
    learner.update(Batch(prompts, [rollout.tokens for rollout in rollouts], rewards, groups))
    lap("train")
    trainer.config = msgspec.structs.replace(trainer.config, updates=2)
    trainer.train(documents)
    lap("drafter")
    engine.load_weights(1, policy.refit_tensors())
    lap("refit")
    engine.load_drafter_weights(1, trainer.weights)
    lap("refit of the head")
    return seconds, sum(rewards) / len(rewards)


def decode(bench, engine, requests):
    """Seconds of a generation, and what its passes gave; a few requests before warm the kernels."""
    engine.generate([msgspec.structs.replace(r, request_id=f"warm/{r.request_id}") for r in requests[:16]])
    before, started = engine.stats(), bench.now()
    rollouts = engine.generate(requests)
    seconds, after = bench.now() - started, engine.stats()
    kept = accept_histogram(rollouts)
    return {
        "seconds": seconds,
        "tokens": sum(len(rollout.tokens) for rollout in rollouts),
        "tokens_per_forward": sum(len(r.tokens) for r in rollouts) / sum(r.forwards for r in rollouts),
        "kept_by_position": [sum(kept[depth:]) / sum(kept) for depth in range(1, len(kept))],
        "draft_share": (after.draft_seconds - before.draft_seconds) / seconds,
        "passes": after.forwards - before.forwards,
    }


def sweep(bench, head, trainer, batches):
    """Every depth at every batch, and the other phases of a step; cells for which no time is left are not run."""
    requests, facts = bench.requests(bench.shape.prompts, 8, "step")
    weights = {name: tensor.detach().clone() for name, tensor in head.checkpoint().items()}
    cells = bench.results["cells"] = []
    slowest = 0.0
    for slots in batches:
        for depth, mode in ((0, "fixed"), *((depth, "fixed") for depth in DEPTHS), (max(DEPTHS), "adaptive")):
            started = time.perf_counter()
            if bench.left() < 3 * slowest + 20:
                print(f"batch {slots}, k = {depth}: no time left", flush=True)
                continue
            engine = make_engine(bench.config(slots, depth, mode), bench.policy, Path("unused"), False)
            if depth:
                engine.load_drafter_weights(0, weights)
            cells.append({"batch": slots, "depth": depth, "mode": mode} | decode(bench, engine, requests))
            engine.close()
            slowest = max(slowest, time.perf_counter() - started)
    engine = make_engine(bench.config(max(batches), 3), bench.policy, Path("unused"), False)
    engine.load_drafter_weights(0, weights)
    bench.results["phases"], bench.results["reward"] = learn(bench, trainer, engine, requests, facts)
    engine.close()


def show(results):
    """The tables."""
    other = results["phases"]
    print(f"\n{results['device']}; reward {results['reward']:.2f}")
    print("a step but for generation, s: " + ", ".join(f"{name} {value:.2f}" for name, value in other.items()) + "\n")
    names = "batch,k,tokens per forward,kept by position (%),generation s,against plain,drafting's share,step s,step"
    print("| " + names.replace(",", " | ") + " |\n" + "|---" * (names.count(",") + 1) + "|")
    plain = {cell["batch"]: cell for cell in results["cells"] if not cell["depth"]}
    rest = sum(other[phase] for phase in ("data", "logprob", "train", "refit"))
    drafts = other["drafter"] + other["refit of the head"]
    for cell in results["cells"]:
        base = plain[cell["batch"]]["seconds"]
        total = cell["seconds"] + rest + (drafts if cell["depth"] else 0.0)
        kept = " ".join(f"{100 * share:.0f}" for share in cell["kept_by_position"]) or "–"
        k = "adaptive" if cell["mode"] == "adaptive" else cell["depth"] or "–"
        print(
            f"| {cell['batch']} | {k} | {cell['tokens_per_forward']:.2f} | {kept} | {cell['seconds']:.2f} | "
            f"{base / cell['seconds']:.2f}x | {cell['draft_share']:.0%} | {total:.2f} | {(base + rest) / total:.2f}x |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "tiny"], default="0.6b")
    parser.add_argument("--batches", help="rows at a time (default: 64,256,16)")
    parser.add_argument("--seconds", type=float, default=480.0, help="the most that the script may take")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not args.tiny:
        print("no GPU: tiny shapes on the CPU, whose figures mean nothing")
    tiny = args.tiny or not has_gpu
    bench = Bench(SHAPES["tiny" if tiny else args.shape], "cpu" if tiny else "cuda", args.seconds)
    teach(bench)
    head, trainer = school(bench)
    batches = [int(part) for part in (args.batches or ("4" if tiny else "64,256,16")).split(",")]
    sweep(bench, head, trainer, batches)
    bench.results["seconds"] = time.perf_counter() - bench.started
    show(bench.results)
    print(f"\n{bench.results['seconds']:.0f} seconds")
    if args.json:
        args.json.write_text(json.dumps(bench.results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
