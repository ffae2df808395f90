"""``paceline audit``: is speculation lossless, here, with this engine and this model?"""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import JsonPath, Overrides, one_line_errors, source, write_json
from paceline.terminal import as_text, safe_console


def audit(
    overrides: Overrides = None,
    policy: Annotated[
        str, typer.Option(metavar="toy|MODEL", help="toy: policies whose laws are known; or a model, as policy.path.")
    ] = "toy",
    config_path: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Settings of a run to audit.", show_default=False, parser=source),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="paceline, transformers, vllm, or MODULE:FUNCTION(policy, speculate, slots)."
        ),
    ] = "paceline",
    setting: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A setting of speculation of another engine.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Prompts, one a line, in place of the own.", show_default=False, parser=source
        ),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this case; may be repeated.", show_default=False)
    ] = None,
    scale: Annotated[float, typer.Option(min=0.01, help="Multiplies the number of requests.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the requests and of the checks.")] = 0,
    witness: Annotated[
        bool, typer.Option(help="Hold tokens to the model's own law; without, speculation on to off.")
    ] = True,
    json_path: JsonPath = None,
) -> None:
    """Audit whether speculation changes anything: tokens, their law, log-probabilities, ends, groups.

    Every case is decoded with speculation on, and compared with the exact law of the policy, and token for token with
    speculation off where the engine promises equal tokens. Exit code 0: lossless as far as was looked, and the table
    says how far that is. 1: not lossless, or lossy by a setting.
    """
    with one_line_errors():
        from paceline.audit.run import audit as run_audit
        from paceline.audit.tables import check_table, power_table, verdict_line
        from paceline.cli.audit_subjects import subject_of

        console = safe_console()
        subject = subject_of(policy, config_path, overrides or [], engine, setting or [], prompts, witness)
        with closing(subject), console.status("auditing") as status:
            found = run_audit(
                subject,
                seed=seed,
                scale=scale,
                only=case or (),
                on_progress=lambda name: status.update(as_text(f"auditing: {name}")),
            )
        console.print(check_table(found))
        if found.power:
            console.print(power_table(found))
        console.print(verdict_line(found), soft_wrap=True)
        write_json(json_path, found)
        raise typer.Exit(found.exit_code)
