"""The vLLM that TRL starts in its own process: what makes it draft, and how the trainer's weights get into it."""

import gc
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import currentframe
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import Trainer

from paceline.config import MODELS, EngineConfig
from paceline.engines.guard import check_lossless
from paceline.engines.vllm.counts import Tally
from paceline.engines.vllm.launch import PLUGIN_KINDS, environment, plugin_settings, speculation
from paceline.engines.vllm.offline import Environment
from paceline.engines.vllm.versions import require_vllm
from paceline.engines.vllm.workarounds import mend_process, mend_worker, refit_refusal, refusal, standing
from paceline.integrations.trl.keeping import Keeper
from paceline.integrations.trl.rollouts import TrlError, figures_from, log
from paceline.integrations.trl.settings import TrlSettings, check_colocated, read_settings
from paceline.schema import EngineStats
from paceline.typed_yaml import ConfigError

PLACE = "speculate"
_REMEDY = "build the trainer within the block, with GRPOConfig(use_vllm=True, vllm_mode='colocate')"
#: Engine arguments that TRL sets for speed alone.
_FREE = ("max_num_batched_tokens",)
#: Those that are set here, and what to do instead.
_OURS = {"speculative_config": "use drafter, and engine.vllm.speculative", "disable_log_stats": "leave it out"}


class Drafting:
    """What ``speculate`` yields: the engine that TRL starts within the block, and what it counts.

    Each generation raises TrlError, one line, for a parameter that vLLM does not honour where it speculates, and has
    the trainer log figures under ``paceline/``. History is kept in the trainer's checkpoints.
    """

    def __init__(self, settings: TrlSettings, options: Mapping[str, Any]) -> None:
        check_colocated(settings, PLACE)
        config = settings.engine.vllm
        self.settings = settings
        self._mend = config.mend
        self._options = {**config.options, **options}
        self._speculative = speculation(settings.drafter, config.speculative)
        self._lossy = check_lossless("vllm", self._speculative or {}, allow_lossy=settings.allow_lossy)
        self.has_started = False
        self._llm: Any = None
        self._trainer: Any = None
        self._unread: Keeper | None = None  # until the first weights say where the run starts
        self._environment: Any = None
        self._tally = Tally()
        self._emitted = self._weight_version = 0
        self._pushed: dict[str, Tensor] = {}

    @property
    def llm(self) -> Any:
        """vLLM's ``LLM``; TrlError where there is none, before TRL started it and after ``close``."""
        if self._llm is None:
            raise TrlError(f"{PLACE}: no engine runs; {_REMEDY}")
        return self._llm

    def stats(self) -> EngineStats:
        """The plug-in's counters. Of another drafter, or none, the tokens: those kept beyond an end count as kept."""
        lossy = (*self._lossy, *standing(speculates=self._speculative is not None, mend=self._mend))
        plugin = self._plugin()
        if plugin is not None:
            return replace(plugin.stats, events=dict(plugin.stats.events), lossy=lossy)
        counts = self._tally.counts
        return EngineStats(
            forwards=counts.passes,
            passes_plain=counts.passes_plain,
            preemptions=counts.preemptions,
            row_forwards=self._emitted - counts.tokens_accepted,
            tokens_emitted=self._emitted,
            tokens_drafted=counts.tokens_drafted,
            tokens_accepted=counts.tokens_accepted,
            weight_version=self._weight_version,
            lossy=lossy,
            events={},
        )

    def history_snapshot(self) -> bytes | None:
        """What the plug-in remembers; None where there is nothing."""
        plugin = self._plugin()
        return None if plugin is None else plugin.snapshot()

    def restore_history(self, data: bytes) -> None:
        """Take over a snapshot. SnapshotError where it is none, or something is remembered already."""
        plugin = self._plugin()
        if plugin is not None:
            plugin.restore(data)

    def close(self) -> None:
        """End vLLM, and free the process for another one."""
        if self._llm is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._trainer = None
        gc.collect()
        gc.unfreeze()  # vLLM froze all that there was
        cleanup_dist_env_and_memory()
        self._environment.restore()

    # What TRL calls in the place of vLLM's own

    def start(self, make: Any, **arguments: Any) -> Any:
        """The ``LLM`` that TRL asks for, made by ``make`` and drafted."""
        if self.has_started:
            raise TrlError(f"{PLACE}: a second engine was asked for within one block; open one for each trainer")
        self._trainer = _asking()
        from vllm.platforms import current_platform

        on_cpu = bool(current_platform.is_cpu())
        arguments = self._arguments(arguments, on_cpu)
        mend_process()
        set_threads = torch.set_num_threads
        self._environment = Environment(environment(EngineConfig(kind="vllm"), on_cpu))
        try:
            llm = make(**arguments)
        except BaseException:
            self._environment.restore()
            raise
        finally:
            torch.set_num_threads = set_threads  # vLLM's worker on the CPU takes it away from the whole process
        mend_worker(_worker(llm).model_runner, self._mend, transfers=on_cpu)
        llm.llm_engine.logger_manager.stat_loggers.append(self._tally)
        llm.generate = partial(self._generate, llm.generate)
        llm.reset_prefix_cache = partial(self._synced, llm.reset_prefix_cache)
        if on_cpu:
            _model(llm).load_weights = self._collect
        self._llm, self.has_started = llm, True
        self._unread = Keeper(self, None, self._trainer.accelerator.process_index)
        self._trainer.add_callback(self._unread)
        return llm

    def _arguments(self, theirs: Mapping[str, Any], on_cpu: bool) -> dict[str, Any]:
        """Engine arguments: TRL's, those of whoever drafts, and a person's own."""
        drafter = self.settings.drafter
        if taken := [name for name in self._options if name in theirs and name not in _FREE]:
            raise TrlError(f"{PLACE}: {taken[0]} is what TRL gives vLLM itself; set it in GRPOConfig, or leave it out")
        for name in set(self._options) & set(_OURS):
            raise TrlError(f"{PLACE}: {name} is set here; {_OURS[name]}")
        if theirs.get("enable_sleep_mode") and self._speculative is not None and drafter.kind in MODELS:
            raise TrlError(
                f"GRPOConfig.vllm_enable_sleep_mode=True: TRL wakes the policy's weights, not those of "
                f"drafter.kind={drafter.kind}; set it to False, or drafter.kind=history"
            )
        arguments = {"enforce_eager": on_cpu, **theirs, **self._options, "disable_log_stats": False}
        if self._speculative is not None:
            arguments["speculative_config"] = self._speculative
            if drafter.kind in PLUGIN_KINDS:
                given = dict(arguments.get("additional_config") or {})
                own, further = plugin_settings(drafter, self.settings.budget, self._mend), given.get("paceline", {})
                arguments["additional_config"] = given | {
                    "paceline": own | further if isinstance(further, dict) else further
                }
        return arguments

    def _generate(self, generate: Any, prompts: Sequence[Any], sampling_params: Any, **more: Any) -> Any:
        refused = refusal(
            sampling_params,
            speculates=self._speculative is not None,
            mend=self._mend,
            allow_lossy=self.settings.allow_lossy,
        )
        if refused is not None:
            raise TrlError(f"GRPOConfig: {refused}")
        before, started = self.stats(), time.perf_counter()
        self._tally.started()
        outputs = generate(prompts, sampling_params=sampling_params, **more)
        seconds = time.perf_counter() - started
        self._emitted += sum(len(one.token_ids) for output in outputs for one in output.outputs)
        after = self.stats()
        emitted, forwards, drafted, accepted = (
            getattr(after, name) - getattr(before, name)
            for name in ("tokens_emitted", "row_forwards", "tokens_drafted", "tokens_accepted")
        )
        log(self._trainer, figures_from(emitted, forwards, drafted, accepted, before, after, seconds))
        return outputs

    def _collect(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """What TRL loads one by one: layers that vLLM packed for the CPU take all of theirs at once."""
        pushed = {name: tensor.detach().clone() for name, tensor in weights}
        self._pushed |= pushed
        return set(pushed)

    def _synced(self, reset_prefix_cache: Any, *arguments: Any, **more: Any) -> Any:
        """TRL's last call after it pushed weights: they are loaded where they were collected, and the drafter hears."""
        if self._pushed:
            self._load()
        state = self._trainer.state
        keeper, self._unread = self._unread, None
        if keeper is not None and state.global_step:
            keeper.restore(self._trainer.args, state)
        self._weight_version = int(state.global_step)
        plugin = self._plugin()
        if plugin is not None:
            plugin.on_weights(self._weight_version)
        return reset_prefix_cache(*arguments, **more)

    def _load(self) -> None:
        from vllm.config import set_current_vllm_config

        from paceline.engines.vllm import transfer

        worker, model = _worker(self.llm), _model(self.llm)
        config = worker.vllm_config
        tied = bool(getattr(config.model_config.hf_config.get_text_config(), "tie_word_embeddings", False))
        refused = refit_refusal(tied=tied, partial=False, mend=self._mend, allow_lossy=self.settings.allow_lossy)
        if refused is not None:
            raise TrlError(f"{PLACE}: {refused}")
        del model.load_weights  # the model's own comes back
        try:
            with set_current_vllm_config(config):
                transfer.load(model, config.model_config, self._pushed.items())
        finally:
            model.load_weights = self._collect
            self._pushed = {}

    def _plugin(self) -> Any:
        """The plug-in; None where another drafter serves."""
        drafts = self._speculative is not None and self.settings.drafter.kind in PLUGIN_KINDS
        return _worker(self.llm).model_runner.drafter if drafts else None


@contextmanager
def speculate(
    settings: TrlSettings | Mapping[str, Any] | str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    tokens: int | None = None,
    **options: Any,
) -> Iterator[Drafting]:
    """Within the block, the vLLM that a trainer starts in its own process (``vllm_mode="colocate"``) drafts.

    ``settings`` and ``overrides`` are those of ``rollout_func``; of ``engine`` TRL leaves ``engine.vllm`` its ``mend``,
    ``options`` and ``speculative``. ``tokens`` is the most drafted for a request and pass, in the place of
    ``drafter.budget``; ``options`` are further engine arguments of vLLM, such as ``dtype``.

    What vLLM samples has the policy's law. Its tokens are not those of a run without drafts: its generator moves with
    the passes. Raises TrlError, ConfigError, LaunchError or LossyError, one line: for settings at once, for what
    contradicts TRL when it starts vLLM, and at the end of the block where it started none.
    """
    require_vllm("plugin")
    from trl.generation import vllm_generation

    read = read_settings(settings, overrides, PLACE)
    if tokens is not None:
        try:
            read = replace(read, drafter=replace(read.drafter, budget=tokens))
        except ValueError as error:
            raise ConfigError(f"{PLACE}: tokens: {error}") from None
    drafting = Drafting(read, options)
    if (make := getattr(vllm_generation, "LLM", None)) is None:
        raise TrlError(f"{PLACE}: TRL was imported where it found no vLLM; import it where vLLM is installed")
    vllm_generation.LLM = partial(drafting.start, make)
    try:
        yield drafting
    finally:
        vllm_generation.LLM = make
    if not drafting.has_started:
        raise TrlError(f"{PLACE}: TRL started no engine within the block; {_REMEDY}")


def _asking() -> Any:
    """The trainer that starts vLLM, found on the stack: TRL passes vLLM's arguments alone."""
    frame = currentframe()
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), Trainer):
            return owner
        frame = frame.f_back
    raise TrlError(f"{PLACE}: vLLM was not started by a trainer; build one within the block")


def _worker(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker


def _model(llm: Any) -> Any:
    return _worker(llm).model_runner.get_model()
