"""What ``paceline doctor`` says of a configured run: what it would refuse, and what it would lose."""

import importlib.util
import os
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from paceline.cli.doctor_findings import Finding, guarded, ok, reason, refused, size, warning
from paceline.cli.doctor_machine import available_bytes, usable_cores
from paceline.config import HEADS, HISTORIES, Config, TrackConfig, is_loopback, load_config
from paceline.schema import PacelineError

AREA = "run"
#: Bytes that training a weight of float32 takes: itself, its gradient and two moments.
_TRAINED = 4
_SPLITS: tuple[Literal["train", "eval"], ...] = ("train", "eval")


def configured(path: Path | None, overrides: Sequence[str]) -> tuple[Config | None, list[Finding]]:
    """The run's configuration, None where it is refused, and a line for each thing to know about it."""
    try:
        config = load_config(path, overrides)
    except PacelineError as error:
        return None, [refused(AREA, "configuration", reason(error))]
    found = [ok(AREA, "configuration", "every key and value is known")]
    for name, look in (
        ("policy", policy),
        ("drafter", drafter),
        ("engine", engine),
        ("tasks", tasks),
        ("sampling", sampling),
        ("checks", checks),
        ("trackers", trackers),
        ("processes", processes),
        ("out", out),
    ):
        found += guarded(AREA, name, partial(look, config))
    return config, found


def needs(config: Config) -> set[str]:
    """The modules that the run imports, by name."""
    modules = {"torch", "transformers"}
    wanted = {
        "peft": config.policy.lora is not None or config.policy.adapter is not None,
        "llguidance": config.sampling.grammar is not None,
        "ray": config.cluster.kind == "ray",
        "vllm": config.engine.kind == "vllm",
        "reasoning_gym": any("reasoning_gym" in (name, task.kind) for name, task in config.tasks.items()),
        "gguf": config.policy.path == "smollm2-135m" and not _cached_smollm2().is_dir(),
    }
    trackers = {"prometheus": "prometheus_client"}
    return (
        modules | {name for name, is_so in wanted.items() if is_so} | {trackers.get(to, to) for to in config.track.to}
    )


def policy(config: Config) -> Iterator[Finding]:
    """Whether the policy is there, fits into memory, and has a device."""
    from paceline.rl.lora import read_adapter, unfold
    from paceline.rl.models import SMOLLM2
    from paceline.rl.policy import device_of

    chosen = unfold(config.policy)
    yield from guarded(AREA, "device", lambda: [ok(AREA, "device", str(device_of(chosen.device)))])
    if chosen.adapter is not None:
        read_adapter(Path(chosen.adapter).expanduser())
        yield ok(AREA, "adapter", chosen.adapter)
    if chosen.path == SMOLLM2 and not _cached_smollm2().is_dir():
        yield ok(AREA, "policy", f"{SMOLLM2} is not in the cache yet", "paceline assets fetches it; else the run does")
        return
    path = str(_cached_smollm2()) if chosen.path == SMOLLM2 else chosen.path
    yield from model("policy", path, "policy.path", config)


def model(name: str, path: str, key: str, config: Config | None = None) -> Iterator[Finding]:
    """Whether the model at ``path`` can be loaded, as far as its files tell; with ``config`` it is the policy."""
    from paceline.forward.model_files import model_source, read_config, weight_files, weight_headers

    source = model_source(path, key)
    if isinstance(source, str):
        yield ok(AREA, name, f"{key}={path} is a hub id", "it is fetched at the start, and not looked at here")
        return
    weights = weight_files(source)
    read_config(source, len(weight_headers(weights)))
    held, free = sum(file.stat().st_size for file in weights), available_bytes()
    yield ok(AREA, name, f"{path}, {size(held)} of weights")
    if config is None:
        return
    if config.policy.lora is None and _TRAINED * held > free and config.policy.device in ("auto", "cpu"):
        says = f"training all weights takes at least {size(_TRAINED * held)}, {size(free)} are free"
        yield warning(AREA, "policy: memory", says, "set policy.lora, or policy.dtype=bfloat16")
    limit, longest = _context(source, config), config.sampling.max_tokens
    if limit and longest >= limit:
        says = f"sampling.max_tokens={longest} leaves no room for a prompt in a context of {limit}"
        yield warning(AREA, "policy: context", says, "lower sampling.max_tokens; answers end at the context")


def drafter(config: Config) -> Iterator[Finding]:
    """Who drafts, whether its files are there, and what it loses."""
    from paceline.history.native import why_not
    from paceline.rl.drafting import learns
    from paceline.rl.engine import drafts

    chosen = config.drafter
    if not drafts(config):
        yield warning(AREA, "drafter", "nothing is drafted: rollouts are decoded plainly", "set drafter.kind=history")
        return
    yield ok(AREA, "drafter", f"{chosen.kind}, up to {chosen.budget} tokens a request and pass")
    if chosen.model_kind == "draft_model":
        yield from model("draft model", chosen.draft_model.path, "drafter.draft_model.path")
    elif chosen.model_kind in HEADS and chosen.head.path is not None:
        yield from model("head", chosen.head.path, "drafter.head.path")
    elif chosen.model_kind in HEADS and chosen.model_kind != "mtp" and not learns(config):
        says = f"drafter.head.path is null and cotrain.when is {config.cotrain.when}: the head drafts untrained"
        yield warning(AREA, "head", says, "name a trained one, or set cotrain.when=pays")
    if chosen.kind in HISTORIES:
        if chosen.history.warm is not None:
            yield warm(chosen.history.warm)
        if why_not():
            yield warning(AREA, "history", "drafts are the same, and take longer", why_not())


def warm(path: str) -> Finding:
    """Whether the history that a run starts from can be read; without, it starts cold."""
    from paceline.history.snapshot import SnapshotError, read_snapshot
    from paceline.rl.layout import history_file

    try:
        held = read_snapshot(history_file(Path(path).expanduser()))
    except SnapshotError as error:
        return warning(AREA, "history", f"starts cold: {reason(error)}", "correct drafter.history.warm, or remove it")
    return ok(AREA, "history", f"starts warm: {held.prompts} prompts, {len(held.tokens)} tokens")


def engine(config: Config) -> Iterator[Finding]:
    """Whether the engine takes these settings, and which of them bend the law."""
    from paceline.engines.guard import check_lossless, verification
    from paceline.engines.vllm.launch import speculation
    from paceline.rl.engine import drafts
    from paceline.typed_yaml import load_by_path

    own = config.engine
    if own.kind == "vllm":
        from paceline.engines.vllm.versions import require_vllm

        if config.policy.dtype == "float64":
            yield refused(AREA, "engine", "policy.dtype=float64: vLLM has no such dtype", "set float32, or hf")
        settings: dict[str, Any] = speculation(config.drafter, own.vllm.speculative) or {}
        lossy = check_lossless("vllm", settings, allow_lossy=config.allow_lossy)
        require_vllm()
        from paceline.engines.vllm.workarounds import refusal, standing

        why = refusal(config.sampling, speculates=drafts(config), mend=own.vllm.mend, allow_lossy=config.allow_lossy)
        if why is not None:
            yield refused(AREA, "sampling", why)
        lossy += standing(speculates=drafts(config), mend=own.vllm.mend) if config.allow_lossy else ()
    else:
        verifier = None if own.verifier is None else load_by_path(own.verifier, "function")
        lossy = check_lossless("paceline", verification(own, verifier), allow_lossy=config.allow_lossy)
        if own.invariant and config.policy.dtype != "float32":
            yield refused(AREA, "engine", "engine.invariant needs policy.dtype=float32", "set one or the other")
        if own.acceptance != "coupled" and config.drafter.model_kind == "draft_model":
            says = f"engine.acceptance={own.acceptance}: equal in distribution only, tokens depend on the drafter"
            yield warning(AREA, "acceptance", says, "set engine.acceptance=coupled for equal tokens")
    if lossy:
        says = f"{', '.join(lossy)}: tokens need not follow the policy's law; every result is stamped"
        yield warning(AREA, "lossy", says, "leave it out")
    yield ok(AREA, "engine", own.kind)


def tasks(config: Config) -> Iterator[Finding]:
    """Whether each task is there and knows its options."""
    from paceline.rl.tasks.registry import check_task

    for name, task in config.tasks.items():
        check_task(name, task)
        if task.unsafe:
            says = f"tasks.{name}.unsafe: its reward runs outside the sandbox, with your rights"
            yield warning(AREA, f"task {name}: sandbox", says, "leave it out unless the reward needs it")
        yield ok(AREA, f"task {name}", f"{task.train_prompts} prompts to train on, {task.eval_prompts} held out")
    if _tokenizer_folder(config) is not None:
        yield from guarded(AREA, "prompts", lambda: list(prompts(config)))


def prompts(config: Config) -> Iterator[Finding]:
    """Whether every prompt can be used: its type, its text, its length. Tasks are built, nothing is fetched."""
    from transformers import AutoTokenizer

    from paceline.rl.policy import encode_prompt, fit_of
    from paceline.rl.prompts import checked_prompts, shared_prompts
    from paceline.rl.tasks.data import DataError, offline
    from paceline.rl.tasks.registry import make_task

    folder = _tokenizer_folder(config)
    assert folder is not None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    fit = fit_of(config, _context(folder, config), 1 << 31)
    for name, task in config.tasks.items():
        try:
            with offline():
                made = make_task(name, task, config.seed)
        except PacelineError as error:
            if isinstance(error.__cause__, DataError):
                yield ok(AREA, f"prompts of {name}", "not looked at: its data is not in the cache", reason(error))
                continue
            raise
        splits = {split: checked_prompts(name, made, split) for split in _SPLITS}
        for split, found in splits.items():
            fit.encoded(name, split, found, lambda text: encode_prompt(tokenizer, config.policy, text))
        shared = shared_prompts(name, splits["train"], splits["eval"])
        if shared is not None:
            yield warning(AREA, f"prompts of {name}", shared, "give the splits prompts of their own")
    for event, line in fit.notices().items():
        yield warning(AREA, event.replace("_", " "), line, "shorten them, or raise the context")
    if not fit.notices():
        yield ok(AREA, "prompts", "every one leaves room for sampling.max_tokens")


def _tokenizer_folder(config: Config) -> Path | None:
    """The policy's folder where it is on this machine and holds a tokenizer."""
    folder = Path(config.policy.path).expanduser()
    return folder if (folder / "tokenizer.json").is_file() and (folder / "config.json").is_file() else None


def sampling(config: Config) -> Iterator[Finding]:
    """Whether the rollouts' law is the one that is trained, and the grammar one that compiles."""
    from paceline.rl.notices import shaped_law

    shaped = shaped_law(config.sampling)
    if shaped is not None:
        yield warning(AREA, "law", shaped, "leave them at their defaults, or watch mismatch_kl")
    grammar = config.sampling.grammar
    if grammar is not None and importlib.util.find_spec("llguidance") is not None:
        folder = Path(config.policy.path).expanduser()
        if (folder / "tokenizer.json").is_file():
            from paceline.forward.model_files import load_tokenizer
            from paceline.sampling.grammar import Vocabulary

            Vocabulary(load_tokenizer(folder, "policy.path")).matcher(grammar)
            yield ok(AREA, "grammar", f"the {grammar.kind} compiles")


def checks(config: Config) -> Iterator[Finding]:
    """What nobody would notice."""
    from paceline.rl.engine import drafts

    if not drafts(config):
        return
    if config.check.every == 0:
        yield warning(AREA, "identity", "no step is ever compared with plain decoding", "set check.every=4")
    if config.engine.sentinel.canaries == 0:
        says = "a drafter that is lost at a refit is seen by its slowness alone"
        yield warning(AREA, "sentinel", says, "set engine.sentinel.canaries=4")


def trackers(config: Config) -> Iterator[Finding]:
    """Whether the trackers are there, and who can read their page."""
    for name in config.track.to:
        found = guarded(AREA, name, partial(_tracker, replace(config.track, to=(name,))))
        yield from found
        if name == "prometheus" and found[-1].outcome == "ok":
            page = config.track.prometheus
            who = "this machine alone" if is_loopback(page.host) else "others, who must send PACELINE_TOKEN"
            if page.port and not _is_free(page.host, page.port):
                says = f"track.prometheus.port={page.port} is taken on {page.host}"
                yield refused(AREA, "port", says, "set another, or 0 for any that is free")
            else:
                yield ok(AREA, "port", f"{page.host}:{page.port} can be read by {who}")


def _tracker(track: TrackConfig) -> Iterator[Finding]:
    from paceline.report.trackers import check_trackers

    check_trackers(track)
    yield ok(AREA, track.to[0], f"is told as {track.project}")


def processes(config: Config) -> Iterator[Finding]:
    """Whether the run asks for more cores than there are."""
    cores = usable_cores()
    if config.threads > cores:
        says = f"threads={config.threads} on {cores:g} cores: they wait for each other"
        yield warning(AREA, "threads", says, f"set threads={max(1, int(cores))}")
    cluster = config.cluster
    if cluster.kind == "ray" and cluster.address is None:
        several = cluster.learner_workers > 1 or config.parallel.ranks > 1
        wanted = cluster.rollout_workers * cluster.worker_cpus + several * config.learner_ranks * cluster.learner_cpus
        if wanted > cores:
            says = f"workers and learners ask for {wanted:g} CPUs, here are {cores:g}: Ray would wait for ever"
            yield warning(AREA, "cluster", says, "lower cluster.worker_cpus, or join a cluster (cluster.address)")


def out(config: Config) -> Iterator[Finding]:
    """Whether the run's folder is free and can be written."""
    from paceline.rl import folder

    target = Path(config.out).expanduser()
    there = next((path for path in (target, *target.absolute().parents) if path.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield refused(AREA, "out", f"out={config.out}: cannot be written", "give another --out")
    elif (target / folder.METRICS).is_file() or (target / folder.CHECKPOINTS).is_dir():
        yield warning(
            AREA, "out", f"{target} holds a run already", "--resume it, --overwrite it, or give another --out"
        )
    else:
        yield ok(AREA, "out", str(target))


def _context(source: Path, config: Config) -> int:
    """The longest sequence that the policy takes; 0 where its configuration does not say."""
    from paceline.forward.model_files import read_config

    found = read_config(source)
    within = found.get("text_config")
    limit = found.get("max_position_embeddings") or (within or {}).get("max_position_embeddings") or 0
    return min(limit, config.engine.context) if config.engine.context and limit else limit


def _cached_smollm2() -> Path:
    from paceline.rl.models import CONVERSION, SMOLLM2
    from paceline.rl.tasks.data import cache_dir

    return cache_dir() / "models" / f"{SMOLLM2}-{CONVERSION}"


def _is_free(host: str, port: int) -> bool:
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True
