"""``paceline warmup``: a short supervised warm-up, so that the policy knows the form of an answer."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import JsonPath, Out, Overrides, one_line_errors, source, with_out, write_json
from paceline.terminal import say


def warmup(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False, parser=source)
    ],
    overrides: Overrides = None,
    out: Out = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Updates.")] = 16,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Answers per update.")] = 8,
    lr: Annotated[float, typer.Option(metavar="RATE", help="Learning rate.")] = 5e-4,
    json_path: JsonPath = None,
) -> None:
    """Teach the policy the form of an answer.

    Trains on the tasks' reference answers and saves the result, a policy.path to start from."""
    with one_line_errors():
        from paceline.config import ConfigError, load_config

        if not 0 < lr < 1:
            raise ConfigError(f"--lr {lr}: must be between 0 and 1, both excluded")
        effective = load_config(config, with_out(overrides, out))
        from paceline.rl.warmup import warmup as run

        result = run(effective, steps=steps, batch=batch, lr=lr, progress=_progress)
        say(
            f"{result.kind} in {result.out}: loss {result.loss_first:.3f} -> {result.loss_last:.3f} nats per token "
            f"over {result.examples} answers, {result.seconds:.0f} s"
        )
        write_json(json_path, result)


def _progress(step: int, steps: int, loss: float) -> None:
    say(f"[{step}/{steps}]  loss {loss:.4f}", flush=True)
