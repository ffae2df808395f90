"""A short supervised warm-up on reference answers: the policy learns the form of an answer before it is rewarded.

Its prompts are none of those that the run trains on or is judged by, as long as the tasks have others.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch

from paceline.config import Config, ConfigError, TaskConfig
from paceline.files import named
from paceline.forward.model_files import foreign
from paceline.forward.optimiser import Optimiser
from paceline.rl import packing
from paceline.rl.folder import made_and_locked
from paceline.rl.policy import Policy
from paceline.rl.prompts import checked_prompts
from paceline.rl.tasks import Prompt, Task, make_task
from paceline.schema import Tokens, as_tokens, derive_seed

Progress = Callable[[int, int, float], None]
"""Receives the step (from 1), the number of steps and the step's loss."""

_LOG = logging.getLogger(__name__)


class WarmupResult(msgspec.Struct, kw_only=True):
    """What a warm-up did. Losses are mean nats per answer token; ``reused`` counts prompts that the run uses too."""

    out: str
    kind: Literal["adapter", "model"]
    steps: int
    examples: int
    reused: int
    loss_first: float
    loss_last: float
    seconds: float


def warmup(
    config: Config,
    steps: int = 16,
    batch: int = 8,
    lr: float = 5e-4,
    out: Path | None = None,
    progress: Progress | None = None,
) -> WarmupResult:
    """Train the policy for ``steps`` updates of ``batch`` answers and write it to ``out`` (None: ``config.out``).

    With LoRA ``out`` becomes a peft adapter directory (float16), without it a model directory. The loss is the mean
    negative log-likelihood of the answers' tokens, their end included; prompts have none. Raises ConfigError where a
    task has no reference answers or the policy no end token; RunExistsError where ``out`` cannot be written, and
    FolderLockedError where another process has it.
    """
    directory = Path(config.out).expanduser() if out is None else out
    # Before the training: a folder that cannot be written, or is in use, is better refused now than after it.
    with made_and_locked(directory, "paceline warmup"):
        return _warmup(config, steps, batch, lr, directory, progress)


def _warmup(
    config: Config, steps: int, batch: int, lr: float, directory: Path, progress: Progress | None
) -> WarmupResult:
    started = time.perf_counter()
    policy = Policy.load(config.policy, config.seed)
    prompts, answers, reused = _examples(config, policy, steps * batch)
    optimiser = Optimiser(policy.trainable(), lr, max_grad_norm=config.rl.max_grad_norm)
    losses = []
    for step in range(steps):
        rows = [(step * batch + i) % len(prompts) for i in range(batch)]
        losses.append(_step(policy, optimiser, [prompts[row] for row in rows], [answers[row] for row in rows], config))
        if progress is not None:
            progress(step + 1, steps, losses[-1])
    with foreign(f"out={named(directory)}: cannot be written"):
        if policy.adapter is not None:
            # Half the size; the rounding is far below what one update changes.
            policy.save_adapter(directory, torch.float16)
        else:
            policy.save_pretrained(directory)
    return WarmupResult(
        out=str(directory),
        kind="model" if policy.adapter is None else "adapter",
        steps=steps,
        examples=len(prompts),
        reused=reused,
        loss_first=losses[0],
        loss_last=losses[-1],
        seconds=time.perf_counter() - started,
    )


def _step(
    policy: Policy, optimiser: Optimiser, prompts: Sequence[Tokens], answers: Sequence[Tokens], config: Config
) -> float:
    """One update; returns the loss before it."""
    limit = config.rl.microbatch_tokens
    tokens = sum(map(len, answers))
    total = 0.0
    for part in packing.microbatches(policy.scorer.trees(prompts, answers, limit), limit):
        logprobs_N, _ = policy.logprobs([prompts[row] for row in part], [answers[row] for row in part], 1.0)
        loss = -logprobs_N.sum() / tokens
        loss.backward()
        total += float(loss.detach())
    optimiser.step()
    return total


def _examples(config: Config, policy: Policy, wanted: int) -> tuple[list[Tokens], list[Tokens], int]:
    """Encoded prompts and answers of all tasks, ``wanted`` at most, shuffled; and how many the run uses too."""
    if not policy.eos_ids:
        raise ConfigError(f"policy.path={config.policy.path}: no end token is known, so answers would never end")
    end = policy.tokenizer.eos_token_id if policy.tokenizer.eos_token_id is not None else policy.eos_ids[0]
    share = -(-wanted // len(config.tasks))
    found: list[tuple[Tokens, Tokens]] = []
    reused = 0
    for name, settings in config.tasks.items():
        task, prompts, own_reused = other_prompts(name, settings, config.seed, share)
        reused += own_reused
        for prompt in prompts:
            answer = policy.tokenizer(_answer(name, task, prompt), add_special_tokens=False)["input_ids"]
            found.append((policy.encode_prompt(prompt.text), as_tokens([*answer, end])))
    found.sort(key=lambda pair: derive_seed("warmup", config.seed, *pair[0].tolist()))
    found = found[:wanted]
    return [prompt for prompt, _ in found], [answer for _, answer in found], reused


def other_prompts(name: str, settings: TaskConfig, seed: int, wanted: int) -> tuple[Task, list[Prompt], int]:
    """Up to ``wanted`` training prompts that the run does not use; only where there are none, those that it does."""
    task = make_task(name, settings, seed)
    used = {prompt.text for split in ("train", "eval") for prompt in checked_prompts(name, task, split)}
    larger = _largest_task(name, settings, seed, wanted)
    fresh = (
        [prompt for prompt in checked_prompts(name, larger, "train") if prompt.text not in used]
        if larger is not None
        else []
    )
    if fresh:
        return task, fresh[:wanted], 0
    _LOG.warning("task %s has no training prompts beyond those of the run; the warm-up uses the same ones", name)
    again = checked_prompts(name, task, "train")[:wanted]
    return task, again, len(again)


def _largest_task(name: str, settings: TaskConfig, seed: int, extra: int) -> Task | None:
    """The task with as many more training prompts as it has, up to ``extra``; None where it has no more."""
    best, low, high = None, 1, extra
    while low <= high:
        # All of them first: most tasks have enough.
        more = high if best is None and high == extra else (low + high) // 2
        try:
            best = make_task(name, msgspec.structs.replace(settings, train_prompts=settings.train_prompts + more), seed)
            low = more + 1
        except ConfigError:
            high = more - 1
    return best


def _answer(name: str, task: Task, prompt: Prompt) -> str:
    try:
        return task.answer(prompt)
    except NotImplementedError:
        raise ConfigError(f"task {name}: it has no reference answers, so there is nothing to warm up on") from None
