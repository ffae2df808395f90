"""What a run says of its own accord: laws that differ, drafts that never come, settings that bend the law."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from paceline.config import TaskConfig
from paceline.rl.sandbox import Isolation
from paceline.schema import EngineStats, SamplingParams


@contextmanager
def warnings_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Within it ``tell`` gets every warning that paceline logs in this process, and that a policy was checked."""
    handler = logging.Handler(logging.INFO)
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name == checks.name)
    handler.emit = lambda record: tell(record.getMessage())  # type: ignore[method-assign]
    log, checks = logging.getLogger("paceline"), logging.getLogger("paceline.forward.self_check")
    level = checks.level
    log.addHandler(handler)
    checks.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        checks.setLevel(level)


def shaped_law(sampling: SamplingParams) -> str | None:
    """Where rollouts follow another law than the one whose gradient is taken, which settings make it so."""
    trained = SamplingParams(
        temperature=sampling.temperature, max_tokens=sampling.max_tokens, stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids, ignore_eos=sampling.ignore_eos,
    )  # fmt: skip
    shaped = [name for name in sampling.__struct_fields__ if getattr(sampling, name) != getattr(trained, name)]
    if not shaped:
        return None
    return (
        f"sampling.{', sampling.'.join(shaped)} shape the rollouts; the update takes the gradient of the law "
        "at temperature alone, see mismatch_kl"
    )


def nothing_drafted(step: int, before: EngineStats, now: EngineStats) -> str | None:
    """Where a whole step verified no draft, what was asked for and offered."""
    if now.tokens_drafted != before.tokens_drafted:
        return None
    asked, offered = now.drafts_asked - before.drafts_asked, now.nodes_offered - before.nodes_offered
    return f"step {step}: {asked} drafts were asked for, {offered} nodes offered, none verified"


def lossy_run(settings: Sequence[str]) -> str | None:
    """Where settings may bend the law, which ones."""
    if not settings:
        return None
    return f"{', '.join(settings)}: tokens need not follow the policy's law; every metric and trace line says so"


def rewards_unsafe(tasks: Mapping[str, TaskConfig]) -> str | None:
    """Where rewards run with the user's rights because the configuration says so, of which tasks."""
    names = ", ".join(name for name, task in tasks.items() if task.unsafe)
    return f"{names}: unsafe is set, so these rewards run outside the sandbox, with your rights" if names else None


def sandbox_incomplete(tasks: Mapping[str, TaskConfig], found: Isolation) -> str | None:
    """Where rewards are confined by less than all of the sandbox, what they can do for want of the rest."""
    lacks = found.lacks()
    return "; ".join(lacks) if lacks and not all(task.unsafe for task in tasks.values()) else None


#: More mismatch than rounding explains, in nats a token. Rounding gives 1e-9 to 1e-7 in float32, 1e-3 in bfloat16; a
#: sampler that is one update behind 1e-3 and more, one that holds a stale matrix about 0.1.
_MISMATCH = {"bfloat16": 2e-2}
_MISMATCH_DEFAULT = 1e-4


def weights_stale(step: int, mismatch_kl: float, sampling: SamplingParams, dtype: str) -> str | None:
    """Where rollouts were sampled from other weights than those that train, how far apart the two are.

    A law that other settings shape differs anyway, and so is not judged; nor is a step that compared nothing (NaN).
    """
    limit = _MISMATCH.get(dtype, _MISMATCH_DEFAULT)
    if shaped_law(sampling) is not None or not mismatch_kl > limit:
        return None
    return (
        f"step {step}: mismatch_kl is {mismatch_kl:.2g} nats, more than rounding explains ({limit:g}): the engine does "
        "not sample from the weights that train, and the gradient is off-policy"
    )
