"""``paceline replay``: what would speculation give on rollouts that were recorded?"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli.common import JsonPath, one_line_errors, picture, source, write_json
from paceline.terminal import safe_console, say

_OFFER = 4


def replay(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="Folders of runs, or rollout logs (JSONL, Parquet).",
            show_default=False,
            parser=source,
        ),
    ],
    drafters: Annotated[
        str, typer.Option(metavar="A,B,C", help="Drafters, with options as NAME:key=value,key=value.")
    ] = "history,ngramrl,suffix_tree_tuned,prompt_lookup",
    budget: Annotated[int, typer.Option(min=1, help="Most tokens drafted for a request in one pass.")] = 16,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time; as recorded: all of a step.", show_default=False)
    ] = None,
    pool: Annotated[
        bool, typer.Option("--pool", help="Let the nodes of the batch compete for what --budget each comes to.")
    ] = False,
    offer: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"With --pool: nodes a request may offer; default {_OFFER} x budget.", show_default=False
        ),
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option(metavar="FILE|PRESET", help="Step times that a speedup is projected from.", show_default=False),
    ] = None,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive", help="Beside, with the adaptive budget of a run, which drops what --cost says loses."
        ),
    ] = False,
    draft_seconds: Annotated[
        Literal["measured", "none"] | None,
        typer.Option(
            help="With --adaptive: what drafting takes, as here or no time; default measured.", show_default=False
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The policy's tokenizer, for logs that hold text.", show_default=False),
    ] = None,
    warm: Annotated[
        Path | None,
        typer.Option(
            metavar="SNAPSHOT",
            help="Start from this history (a snapshot, or a run's folder).",
            show_default=False,
            parser=source,
        ),
    ] = None,
    json_path: JsonPath = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Also draw tokens per forward by epoch (SVG, PNG).", show_default=False, parser=picture
        ),
    ] = None,
) -> None:
    """Replay recorded rollouts through drafters, without a model.

    A draft is accepted while it equals what was recorded, which is what a lossless engine would have accepted. Reads
    runs of paceline and the rollout logs of TRL, verl, SkyRL, slime, prime-rl, NeMo RL and NeMo Gym.
    """
    with one_line_errors():
        from paceline.rl.layout import history_file
        from paceline.schema import PacelineError
        from paceline.simulate.drafters import split_names
        from paceline.simulate.logs import summary_lines
        from paceline.simulate.plot import write_plot
        from paceline.simulate.results import TraceResult, settings_line, trace_line, trace_tables
        from paceline.simulate.run import replay_traces

        if offer is not None and not pool:
            raise PacelineError("--offer says what a request may offer to the pool; add --pool")
        if draft_seconds is not None and not adaptive:
            raise PacelineError("--draft-seconds says what drafting takes with --adaptive; add it")
        console = safe_console()

        def show(name: str, trace: TraceResult) -> None:
            console.print(trace_line(name, trace), soft_wrap=True)
            for line in summary_lines(trace.left_out, trace.unclear):
                console.print(line, soft_wrap=True)
            for table in trace_tables(trace):
                console.print(table)

        result = replay_traces(
            traces,
            split_names(drafters),
            budget=budget,
            batch=batch,
            offer=(offer or _OFFER * budget) if pool else None,
            cost=cost,
            adaptive=(draft_seconds or "measured") if adaptive else None,
            tokenizer=tokenizer,
            warm=None if warm is None else history_file(warm),
            warn=lambda line: say(f"warning: {line}", error=True),
            on_trace=show,
        )
        console.print(settings_line(result), soft_wrap=True)
        write_json(json_path, result)
        if plot is not None:
            write_plot(result, plot)
