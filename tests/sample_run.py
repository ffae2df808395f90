"""Made-up rollouts, steps and whole run folders with plausible numbers, for the tests of reports and commands."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import Config, dump_config
from paceline.files import write_atomically
from paceline.report.trace import MetricsWriter, TraceRow, TraceWriter
from paceline.schema import Rollout, StepRecord, as_tokens

ANSWER = '{"name": "find_flights", "arguments": {"origin": "Oslo", "city": "Rome", "day": "2026-05-01", "seats": 2}}'
WORDS = ["<s>", *ANSWER.replace('"', ' " ').replace("_", " _ ").split(), "</s>"]


def decode(tokens: Sequence[int]) -> list[str]:
    """A toy tokenizer: one word a token, the space before it included."""
    return [f" {WORDS[token % len(WORDS)]}" for token in tokens]


def make_rollout(tokens: Sequence[int], **changes: Any) -> Rollout:
    lengths = changes.pop("accept_lengths", [0] * len(tokens))
    size = len(tokens)
    fields: dict[str, Any] = {
        "request_id": "r0",
        "group": "g0",
        "prompt_key": "p0",
        "prompt": as_tokens([1]),
        "tokens": as_tokens(tokens),
        "logprobs": np.full(size, -0.25),
        "raw_logprobs": np.full(size, -0.25),
        "logprob_mode": "processed",
        "margins": np.ones(size),
        "versions": as_tokens([0] * size),
        "sources": np.zeros(size, dtype=np.uint8),
        "finish_reason": "stop",
        "forwards": len(lengths),
        "drafted": 0,
        "accepted": sum(lengths),
        "accept_lengths": as_tokens(lengths),
    }
    return Rollout(**(fields | changes))


def make_record(step: int, **changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "step": step,
        "epoch": step // 2,
        "reward": 0.5,
        "reward_std": 0.2,
        "rollouts": 64,
        "tokens": 1920,
        "response_tokens_mean": 30.0,
        "tokens_per_forward": 4.0,
        "acceptance": 0.6,
        "drafted_per_forward": 5.0,
        "policy_forwards": 60,
        "loss": -0.01,
        "grad_norm": 0.8,
        "lr": 5e-4,
        "kl": 0.0,
        "entropy": 0.3,
        "clip_fraction": 0.01,
        "mismatch_kl": 1e-6,
        "reward_errors": 0,
        "truncated": 0.05,
        "weight_version": step,
        "seconds": {"generation": 8.0, "reward": 0.2, "train": 12.0, "refit": 0.5, "other": 0.3},
        "plain_seconds_projected": 16.0,
        "speedup_projected": 2.0,
    }
    return StepRecord(**(fields | changes))


def make_records(epochs: int = 4, steps_per_epoch: int = 4, drafts: bool = True, seed: int = 3) -> list[StepRecord]:
    """A run that learns, and drafts better from its second epoch on."""
    random = np.random.default_rng(seed)
    records = []
    for step in range(epochs * steps_per_epoch):
        epoch, progress = step // steps_per_epoch, step / max(1, epochs * steps_per_epoch - 1)
        tokens = int(random.integers(1700, 2100))
        depth = (1.6 if epoch == 0 else 5.2 + 0.5 * epoch) + random.normal(0, 0.15) if drafts else 1.0
        rows = round(tokens / depth)
        lengths = np.bincount(np.minimum(random.geometric(1 / depth, rows) - 1, 16), minlength=17) if drafts else [rows]
        generation = 20.0 / depth**0.62 + random.normal(0, 0.3)
        checked, plain = step % 4 == 0, 20.0 + random.normal(0, 0.4)
        records.append(
            make_record(
                step,
                epoch=epoch,
                reward=float(0.42 + 0.22 * math.sqrt(progress) + random.normal(0, 0.02)),
                reward_std=float(0.31 - 0.08 * progress),
                tokens=tokens,
                response_tokens_mean=tokens / 64,
                tokens_per_forward=tokens / rows,
                acceptance=float(0.25 + 0.4 * min(1, epoch)) if drafts else math.nan,
                drafted_per_forward=(depth - 1) / (0.25 + 0.4 * min(1, epoch)) if drafts else 0.0,
                accept_lengths=[int(count) for count in lengths],
                seconds={
                    "generation": float(generation),
                    "reward": 0.3,
                    "train": float(11 + random.normal(0, 0.5)),
                    "refit": 0.6,
                    "check": float(plain * 0.4) if checked else 0.0,
                    "other": 0.4,
                },
                plain_seconds_projected=float(plain),
                speedup_projected=float(plain / generation),
                plain_seconds_measured=float(plain * 0.4) if checked else math.nan,
                speedup_measured=float(plain / generation * 0.96) if checked else math.nan,
                identity="identical" if checked else "not checked",
                eval_reward=float(0.4 + 0.2 * progress) if step % 4 == 3 else math.nan,
                task_rewards={"function_call": 0.5},
                events={"slots_full": 2} if step == 1 else {},
                **(_drafted(step, rows, tokens) if drafts else {}),
            )
        )
    return records


def _drafted(step: int, rows: int, tokens: int) -> dict[str, Any]:
    """What is known of a step in which a head drafted that learns every other step."""
    trained = step % 2 == 0
    return {
        "depths_tested": [rows, rows // 2, rows // 4],
        "depth_acceptance": [0.6 + 0.01 * step, 0.5, 0.3],
        "token_sources": {"policy": rows, "model": tokens - rows},
        "draft_trained": trained,
        "draft_reason": "every" if trained else "between",
        "draft_loss": 2.0 / (1 + step) if trained else math.nan,
        "draft_overlaps": [0.5 + 0.01 * step, 0.3] if trained else [],
        "draft_propose_seconds": 0.8,
        "draft_read_seconds": 0.1,
        "draft_train_seconds": 0.5 if trained else math.nan,
        "draft_refit_seconds": 0.01 if trained else math.nan,
        "draft_gain_seconds": 1.5,
    }


def make_rows(records: Sequence[StepRecord], per_step: int = 8, seed: int = 5) -> list[TraceRow]:
    """Rollouts of ``decode``'s words that grow less plain from epoch to epoch."""
    random = np.random.default_rng(seed)
    rows = []
    for record in records:
        for index in range(per_step):
            tokens = [int(token) for token in range(1, len(WORDS))]
            if index % 3 == 1:
                tokens[int(random.integers(6, 30))] = int(random.integers(1, len(WORDS)))
            runs: list[tuple[str, int]] = []
            while (left := len(tokens) - sum(count for _, count in runs)) > 0:
                runs.append(("policy", 1))
                if record.epoch and left > 1:
                    runs.append(
                        ("history" if random.random() < 0.7 else "sibling", int(min(left - 1, random.integers(2, 12))))
                    )
                elif left > 4 and random.random() < 0.3:
                    runs.append(("prompt", 2))
            forwards = sum(count for name, count in runs if name == "policy")
            rows.append(
                TraceRow(
                    epoch=record.epoch,
                    step=record.step,
                    prompt_id=(record.step * 2 + index // 4) % 8,
                    sample_idx=index % 4,
                    reward=1.0 if index % 3 else 0.4,
                    tokens=tokens,
                    task="function_call",
                    request_id=f"{record.step}/{index}",
                    logprobs=[-0.1] * len(tokens),
                    logprob_mode="processed",
                    version=record.weight_version,
                    finish="stop",
                    forwards=forwards,
                    drafted=2 * (len(tokens) - forwards),
                    accepted=len(tokens) - forwards,
                    sources=runs,
                    near_ties=[],
                )
            )
    return rows


def write_run(
    folder: Path, records: Sequence[StepRecord], rows: Sequence[TraceRow] = (), config: Config | None = None
) -> Path:
    """The files that a training run leaves in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (folder / name).unlink(missing_ok=True)
    write_atomically(folder / "config.yaml", dump_config(config or Config()).encode())
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        metrics.write(records)
    with TraceWriter(folder / "rollouts.jsonl") as trace:
        trace.write(rows)
    return folder
