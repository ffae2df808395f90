"""``paceline doctor``: is everything there that a run needs, and is speculation lossless here?"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.common import JsonPath, Overrides, one_line_errors, write_json
from paceline.terminal import safe_console

if TYPE_CHECKING:
    from paceline.cli.doctor_findings import Finding

#: What the self-check audits: the cases that between them put chains, trees, ragged and empty drafts, cut and shaped
#: laws, greedy decoding, refusals and a head before the verifier, in the least time.
CASES = ("plain", "tree", "ragged", "cut", "shaped", "raw", "greedy", "refusals", "mtp")
_SCALE = 0.1


def doctor(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="YAML file of a run to look at.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    check: Annotated[bool, typer.Option(help="Audit the toy policies, in less than half a minute.")] = True,
    json_path: JsonPath = None,
) -> None:
    """Say what is installed, what of this machine hurts and, with CONFIG, what that run would refuse or lose.

    One line each: ok, warning or refused, and what to do. No weights are loaded, nothing is fetched and nothing is
    written. Then speculation is audited on small policies whose laws are known. Exit code 1: something is refused, or
    the audit failed.
    """
    with one_line_errors():
        from paceline.cli.doctor_findings import findings_table, guarded
        from paceline.cli.doctor_machine import machine
        from paceline.cli.doctor_packages import installed
        from paceline.cli.doctor_run import configured, needs

        given, path = list(overrides or []), config
        if path is not None and "=" in path:  # no file, only overrides
            given, path = [path, *given], None
        console = safe_console()
        with console.status("looking") as status:
            run, findings = configured(None if path is None else Path(path), given) if path or given else (None, [])
            needed = needs(run) if run is not None else ()
            found = [
                *guarded("installed", "packages", lambda: installed(needed)),
                *guarded("machine", "machine", machine),
                *findings,
            ]
            if check:
                status.update("auditing the toy policies")
                found += guarded("self-check", "audit", self_check)
        console.print(findings_table(found))
        verdict = said(found)
        console.print(verdict, soft_wrap=True)
        write_json(json_path, {"verdict": verdict, "findings": found})
        raise typer.Exit(any(finding.outcome == "refused" for finding in found))


def self_check() -> list["Finding"]:
    """Whether speculation is lossless on the toy policies, by a small audit."""
    from paceline.audit.learned import LearnedSubject
    from paceline.audit.run import audit
    from paceline.audit.subject import Joined, ToySubject
    from paceline.audit.tables import verdict_line
    from paceline.cli.doctor_findings import ok, refused

    found = audit(Joined(ToySubject(), LearnedSubject()), scale=_SCALE, only=CASES)
    if found.exit_code == 0:
        says = f"lossless: {found.rollouts:,} rollouts, {found.tokens:,} tokens, {len(found.checks)} checks"
        return [ok("self-check", "audit", f"{says} in {found.seconds:.0f} s")]
    return [refused("self-check", "audit", verdict_line(found), "see paceline audit, which looks closer")]


def said(findings: Sequence["Finding"]) -> str:
    """All findings in one line."""
    counts = {outcome: sum(f.outcome == outcome for f in findings) for outcome in ("refused", "warning")}
    if not any(counts.values()):
        return "nothing is wrong"
    from paceline.report.metrics import counted

    return f"{counts['refused']} refused, {counted(counts['warning'], 'warning')}"
