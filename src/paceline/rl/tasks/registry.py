"""Finds a task by its name and builds it: built in, a user's own ``module:Class``, or one that a package registers."""

import inspect
from importlib.metadata import entry_points
from typing import Any

import msgspec

from paceline.config import ConfigError, TaskConfig
from paceline.rl.sandbox import isolation
from paceline.rl.tasks.base import Task
from paceline.terminal import printable
from paceline.typed_yaml import load_by_path, nearest

ENTRY_POINTS = "paceline.tasks"
BUILT_IN: dict[str, str] = {
    "function_call": "paceline.rl.tasks.function_call:FunctionCall",
    "reasoning_gym": "paceline.rl.tasks.reasoning_gym:ReasoningGym",
    "text_to_sql": "paceline.rl.tasks.text_to_sql:TextToSql",
}

_METHODS = ("prompts", "reward", "answer")
_SET_BY_THE_RUN = ("seed", "train_prompts", "eval_prompts")


def make_task(name: str, config: TaskConfig, seed: int) -> Task:
    """Build the configured task ``name``. Its ``kind`` is a built-in name, ``module:Class`` or an entry point.

    Modules are looked for in the working directory too. Raises ConfigError, one line that names the task, for whatever
    fails: an unknown kind or option, a module that cannot be imported, a constructor that raises.
    """
    kind = config.kind or name
    try:
        build = _find(kind)
        _check_options(build, config.options)
        _check_sandbox(name, build, config)
        task = build(seed=seed, train_prompts=config.train_prompts, eval_prompts=config.eval_prompts, **config.options)
        missing = [method for method in _METHODS if not callable(getattr(task, method, None))]
        if missing:
            raise ConfigError(f"{kind} has no method {', '.join(missing)}; a task has {', '.join(_METHODS)}")
        require_sandbox(name, getattr(task, "needs_sandbox", None), unsafe=config.unsafe)
    except Exception as error:  # a user's own code runs here; the cause stays attached
        said = str(error) if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"task {name}: {' '.join(said.split())}") from error
    return task


def check_task(name: str, config: TaskConfig) -> None:
    """Raise ConfigError, one line, where the configured task ``name`` is not there or its options do not fit.

    Nothing is built or fetched: what the task's constructor would refuse is seen at the start of a run.
    """
    try:
        build = _find(config.kind or name)
        _check_options(build, config.options)
        _check_sandbox(name, build, config)
    except ConfigError as error:
        raise ConfigError(f"task {name}: {error}") from error


def require_sandbox(name: str, why: object, *, unsafe: bool) -> None:
    """Refuse by ConfigError to judge the task ``name`` where it must be confined because of ``why`` and cannot be."""
    if why and not unsafe and not isolation().holds:
        raise ConfigError(
            f"{printable(why)}, and this machine has no sandbox (see paceline doctor); run on Linux with seccomp, or "
            f"accept the risk with tasks.{name}.unsafe=true"
        )


def _check_sandbox(name: str, build: Any, config: TaskConfig) -> None:
    """Refuse before anything is built what needs a sandbox that is not there, where the options tell."""
    reason = getattr(build, "why_confined", None)
    require_sandbox(name, reason(config.options) if callable(reason) else None, unsafe=config.unsafe)


def _find(kind: str) -> Any:
    if kind in BUILT_IN:
        return load_by_path(BUILT_IN[kind])
    if ":" in kind:
        return load_by_path(kind)
    registered = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    if kind in registered:
        return load_by_path(registered[kind])
    raise ConfigError(
        f"no task kind {kind!r}{nearest(kind, {*BUILT_IN, *registered})}; a class of your own is module:Class"
    )


def _check_options(build: Any, options: dict[str, Any]) -> None:
    """Refuse what the constructor does not know, miss or type otherwise, before it runs."""
    parameters = inspect.signature(build, eval_str=True).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = [
        parameter.name
        for parameter in parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.name not in _SET_BY_THE_RUN
    ]
    for option, value in options.items():
        if option in _SET_BY_THE_RUN:
            raise ConfigError(f"options.{option} is set by the run itself; remove it")
        if option not in known and not takes_all:
            raise ConfigError(f"unknown option {option!r}{nearest(option, known)}")
        if option in known and parameters[option].annotation in (bool, int, float, str):
            try:
                msgspec.convert(value, parameters[option].annotation)
            except msgspec.ValidationError as error:
                raise ConfigError(f"option {option}: {str(error).replace('`', '')}, got {value!r}") from None
    for option in known:
        if parameters[option].default is parameters[option].empty and option not in options:
            raise ConfigError(f"the option {option!r} is missing; write it under options")
