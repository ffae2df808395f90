"""A certificate as people read it: what was checked, what it could have seen, and the verdict."""

import math

from rich.table import Table

from paceline.audit.certificate import Certificate, Check

_SHOWN_SHIFT = 0.05


def check_table(certificate: Certificate) -> Table:
    """One line per kind of check: how many cases, the smallest adjusted p-value, and what failed first."""
    table = Table(title=f"{certificate.subject}, {certificate.engine}", title_justify="left")
    for heading, justify in (("check", "left"), ("cases", "right"), ("looked at", "right"), ("least p", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("found", overflow="fold")
    kinds: dict[str, list[Check]] = {}
    for check in certificate.checks:
        kinds.setdefault(check.name, []).append(check)
    for name, checks in kinds.items():
        failed = [check for check in checks if check.outcome == "fail"]
        weighed = [check.adjusted for check in checks if check.adjusted is not None]
        found = "as it must be"
        if failed:
            found = f"[red]{len(failed)} failed[/], first {failed[0].case}: {failed[0].says}"
            known = sorted({check.fault for check in failed if check.fault})
            found += f"; known: {', '.join(known)}" if known else ""
        elif checks[0].outcome == "refused":
            found = f"not offered, not certified: {', '.join(check.case for check in checks)}"
        least = f"{min(weighed):.3g}" if weighed else ""
        table.add_row(name, str(len(checks)), f"{sum(check.draws for check in checks):,}", least, found)
    for live in certificate.live:
        found = f"[red]rejects at position {live.stopped_at:,}[/]" if live.rejects else f"log e {live.peak_log_e:.1f}"
        if live.needs:
            shift, needed = next((s, n) for s, n in live.needs.items() if float(s) >= _SHOWN_SHIFT)
            found += f" (a shift of {shift} takes {needed:,.0f} positions)"
        table.add_row(f"sequential: {live.name}", "all", f"{live.draws:,}", "", found)
    return table


def power_table(certificate: Certificate) -> Table:
    """What deviation each statistical check would have caught, with which probability."""
    table = Table(title="the smallest deviation that would have been caught, with probability", title_justify="left")
    table.add_column("check")
    table.add_column("case")
    for heading in ("draws", ".5", ".9", ".99"):
        table.add_column(heading, justify="right")
    table.add_column("in")
    for row in certificate.power:
        sizes = [row.caught_half, row.caught_90, row.caught_99]
        shown = ["never" if math.isinf(size) else f"{size:.3f}" for size in sizes]
        table.add_row(row.name, row.case, f"{row.draws:,}", *shown, row.deviation)
    return table


def verdict_line(certificate: Certificate) -> str:
    """The verdict, and what it rests on."""
    c = certificate
    accepted = f"{c.accepted / c.drafted:.0%} of {c.drafted:,} drafted accepted" if c.drafted else "nothing drafted"
    return (
        f"{c.verdict}: {c.message}; {c.rollouts:,} responses, {c.tokens:,} tokens, {accepted}, {c.seconds:.0f} s, "
        f"digest {c.digest}"
    )
