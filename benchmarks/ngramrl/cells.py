"""The cells of the experiment: which they are, and how each comes by its policy and its recorded run."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.config import BudgetConfig, Config, load_config
from paceline.drafters import Drafter
from paceline.engines.hf import HFEngine
from paceline.report.trace import read_metrics
from paceline.rl import folder
from paceline.rl.curriculum import Curriculum, Item, load_items, rollout_requests
from paceline.rl.loop import train
from paceline.rl.policy import Policy
from paceline.rl.tasks import make_task
from paceline.rl.warmup import warmup
from paceline.schema import PacelineError, RolloutRequest

HERE = Path(__file__).parent
WORKLOADS = ("function_call", "text_to_sql", "n_queens")
FAMILIES = ("qwen3", "smollm2")
BUDGET = 16
TUNED_ARCTIC = "arctic:per_prompt=true,tree=true,depth=64,factor=4,min_prob=0.02"
#: Every drafter of the table, as ``paceline replay --drafters`` names it.
DRAFTERS = (
    "history",
    "history:prefetch=16",
    "ngramrl",
    "ngramrl_window",
    "ngramrl_prefetch",
    "suffix_tree",
    "suffix_tree_tuned",
    "suffix_tree_global",
    "prompt_lookup",
    "prompt_lookup_earliest",
    "histospec",
    "seer",
    "rest",
    "arctic",
    TUNED_ARCTIC,
)
_SMOLLM2 = "smollm2-135m"
#: Steps of a warm-up, and what it changes in the cell's configuration: it learns on boards with more to fill.
_WARMUPS = {
    "text_to_sql": (24, ()),
    "n_queens": (40, ("tasks.n_queens.options.min_remove=2", "tasks.n_queens.options.max_remove=5")),
}


@dataclass(frozen=True)
class Cell:
    """One workload with one family of policies."""

    workload: str
    family: str

    @property
    def name(self) -> str:
        """``workload-family``: the name of its configuration and of its run."""
        return f"{self.workload}-{self.family}"

    @property
    def config_path(self) -> Path:
        """Its configuration."""
        return HERE / "configs" / f"{self.name}.yaml"

    def config(self, *overrides: str) -> Config:
        """Its configuration, with ``section.key=value`` overrides."""
        return load_config(self.config_path, list(overrides))


CELLS = tuple(Cell(workload, family) for family, workload in itertools.product(FAMILIES, WORKLOADS))


def choose(names: str) -> list[Cell]:
    """The cells of a list ``a,b``; all of them for an empty one."""
    known = {cell.name: cell for cell in CELLS}
    unknown = [name for name in names.split(",") if name and name not in known]
    if unknown:
        raise PacelineError(f"--cells: no cell {unknown[0]!r}; known: {', '.join(known)}")
    return [known[name] for name in names.split(",") if name] or list(CELLS)


def make_policy(cell: Cell) -> None:
    """Pre-train or warm up the policy that the cell starts from, where it is missing."""
    config = cell.config()
    path = Path(config.policy.path)
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        return
    if cell.family == "qwen3":
        subprocess.run([sys.executable, str(HERE / "pretrain_qwen3.py"), cell.workload], check=True)
        return
    steps, changed = _WARMUPS[cell.workload]
    made = warmup(cell.config(f"policy.path={_SMOLLM2}", *changed), steps=steps, out=path)
    print(f"{made.out}: loss {made.loss_first:.3f} -> {made.loss_last:.3f} in {made.seconds:.0f} s", flush=True)


def record(cell: Cell, on_event: Callable[[object], None] = lambda _event: None) -> Path:
    """The folder of the cell's recorded run, trained to its end; a run that was broken off goes on."""
    config = cell.config()
    out = Path(config.out)
    started = (out / folder.METRICS).is_file()
    if not (started and is_recorded(cell)):
        make_policy(cell)
        train(config, resume=started, on_event=on_event)
    return out


def is_recorded(cell: Cell) -> bool:
    """Whether all steps of the cell's run are on disk, and its trained policy."""
    config = cell.config()
    out = Path(config.out)
    prompts = sum(task.train_prompts for task in config.tasks.values())
    steps = config.rl.epochs * -(-prompts // config.rl.prompts_per_step)
    metrics = out / folder.METRICS
    return metrics.is_file() and len(read_metrics(metrics)) == steps and (out / folder.POLICY).is_dir()


def trained_policy(cell: Cell) -> Policy:
    """The policy as the recorded run left it."""
    config = cell.config()
    return Policy.load(cell.config(f"policy.path={Path(config.out) / folder.POLICY}").policy, config.seed)


def verifying_engine(cell: Cell, policy: Policy, drafter: Drafter) -> HFEngine:
    """An engine with a copy of the policy that verifies every offered node, in batches as the recorded run had."""
    config = cell.config()
    return HFEngine(
        policy.engine_model(),
        drafter=drafter,
        budget=BUDGET,
        budget_config=BudgetConfig(mode="fixed"),
        # No pass is so large that drafts are cut to fit.
        config=msgspec.structs.replace(config.engine, max_batched_tokens=1 << 16),
        seed=config.seed,
        eos_ids=policy.eos_ids,
    )


def next_steps(cell: Cell, policy: Policy) -> Iterator[tuple[list[Item], list[RolloutRequest]]]:
    """Prompts and requests of the steps that the recorded run would go on with, epoch after epoch."""
    config = cell.config()
    tasks = {name: make_task(name, task, config.seed) for name, task in config.tasks.items()}
    curriculum = Curriculum(load_items(tasks, "train", policy.encode_prompt), config.rl, config.seed)
    for step in itertools.count(curriculum.steps):
        items = curriculum.step_items(step)
        yield items, rollout_requests(items, config.rl.group_size, config.sampling, config.seed, str(step))
