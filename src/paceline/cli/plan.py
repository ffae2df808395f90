"""``paceline plan``: what would co-training a drafter take at this context length, on so many GPUs?"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli.common import JsonPath, one_line_errors, picture, write_json
from paceline.terminal import safe_console, say

_Axis = Annotated[int | None, typer.Option(min=1, help="Ranks of this axis; as it is best.", show_default=False)]


def plan(
    model: Annotated[
        str, typer.Option(metavar="NAME|PATH", help="A preset, or a config.json or its folder.", show_default=False)
    ],
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 262144,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs altogether.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 64,
    data: _Axis = None,
    context_parallel: _Axis = None,
    tensor: _Axis = None,
    pipeline: _Axis = None,
    expert: _Axis = None,
    schedule: Annotated[
        str, typer.Option(metavar="NAME", help="The pipeline's schedule, by torch's name; all: compare them.")
    ] = "1F1B",
    stages_per_rank: Annotated[
        int | None,
        typer.Option(min=1, help="Stages of a rank where a schedule takes several; 2.", show_default=False),
    ] = None,
    drafter: Annotated[Literal["eagle3", "dflash"], typer.Option(help="The drafter's kind.")] = "eagle3",
    drafter_layers: Annotated[
        int | None, typer.Option(min=1, help="Its layers; eagle3: 1, dflash: 5.", show_default=False)
    ] = None,
    draft_vocabulary: Annotated[int, typer.Option(min=0, help="Tokens that eagle3 drafts from; 0: all.")] = 0,
    passes: Annotated[
        int | None,
        typer.Option(min=1, help="Passes that eagle3 is trained for; as cotrain.passes.", show_default=False),
    ] = None,
    block: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a block of dflash; as drafter.head.block.", show_default=False)
    ] = None,
    checkpoint: Annotated[bool, typer.Option(help="Run the policy's layers again in the backward pass.")] = True,
    memory_gib: Annotated[float, typer.Option(metavar="GIB", help="Memory of a GPU.")] = 80.0,
    node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    json_path: JsonPath = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Also draw the memory by kind (PNG, SVG).", show_default=False, parser=picture
        ),
    ] = None,
) -> None:
    """Plan a drafter's co-training: memory by kind, bytes moved, and the layouts of GPUs that fit.

    Nothing is run: sizes follow from the model's configuration. Layouts that fit come first, the quickest of them on
    top; axes that are given hold for all. With --schedule all every schedule is tried, and compared on the ranks of the
    first layout that has a pipeline.
    """
    with one_line_errors():
        from paceline.cotrain.parallel.plan.drafter import drafter_for
        from paceline.cotrain.parallel.plan.layouts import Job
        from paceline.cotrain.parallel.plan.plan import make_plan
        from paceline.cotrain.parallel.plan.tables import bars, heading, tables, verdict
        from paceline.cotrain.parallel.plan.timing import Hardware
        from paceline.simulate.bars import write_bars
        from paceline.sizes.shapes import load_shape

        shape = load_shape(model)
        head = drafter_for(
            shape, drafter, layers=drafter_layers, vocabulary=draft_vocabulary, passes=passes, block=block
        )
        job = Job(shape=shape, drafter=head, context=context, batch=batch, gpus=gpus, checkpoint=checkpoint)
        axes = {
            "data": data,
            "context": context_parallel,
            "tensor": tensor,
            "pipeline": pipeline,
            "expert": expert,
        }
        result = make_plan(
            job,
            axes,
            memory_gib=memory_gib,
            hardware=Hardware(node=node),
            schedule=schedule,
            stages_per_rank=stages_per_rank,
        )
        console = safe_console()
        console.print(heading(result), soft_wrap=True)
        console.print(verdict(result), soft_wrap=True)
        for table in tables(result):
            console.print()
            console.print(table)
        write_json(json_path, result)
        if out is not None:
            rows, limit = bars(result)
            write_bars(rows, out, title=shape.name, unit="GiB of the fullest rank", limit=("limit", limit))
            say(out)
