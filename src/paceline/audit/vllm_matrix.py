"""What vLLM honours, refuses or gets wrong, as a table made from the certificates of audits."""

from collections.abc import Mapping, Sequence

from paceline.audit.certificate import Certificate, Check

#: What each case of the audit stands for.
FEATURES = {
    "plain": "`temperature` 1",
    "cool": "`temperature` below 1",
    "greedy": "`temperature` 0",
    "top-k": "`top_k`",
    "top-p": "`top_p`",
    "min-p": "`min_p`",
    "bias": "`logit_bias`",
    "repeats": "`repetition_penalty`",
    "presence": "`presence_penalty`",
    "frequency": "`frequency_penalty`",
    "words": "`bad_words`",
    "least": "`min_tokens`",
    "allowed": "`allowed_token_ids`",
    "stop ids": "`stop_token_ids`",
    "stop strings": "`stop`",
    "past the end": "`ignore_eos`",
    "five": "`max_tokens`",
    "limit": "the end of the context",
    "short prompts": "prompts of one token",
    "grammar": "`grammar`",
    "trigger": "`grammar` with a trigger",
    "siblings": "`n`",
    "company": "other parameters in the same pass",
    "aborts": "aborts in the same pass",
    "raw": "`logprobs: raw`",
    "seeds": "`seed`: alone, the same tokens again",
    "refit": "new weights",
    "refit, in part": "new weights, a part of a fused layer",
    "refit, tied": "new weights, tied embeddings",
}


def support_table(certificates: Mapping[str, Certificate]) -> str:
    """A table in Markdown: one row a feature, one column a certificate, under its heading.

    A cell says ``honoured``; ``refused``, and where a fault of vLLM is the reason, which; or the fault, and the checks
    by which the audit found it. A failure that no known fault explains is in bold. A feature that was not audited has
    an empty cell.
    """
    lines = [f"| | {' | '.join(certificates)} |", "|---" * (1 + len(certificates)) + "|"]
    for case, feature in FEATURES.items():
        cells = [_cell([check for check in found.checks if check.case == case]) for found in certificates.values()]
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(certificate: Certificate) -> str:
    """One sentence: how large the audit was and how it ended."""
    settings = ", ".join(f"{name} {value}" for name, value in certificate.settings.items() if name != "policy")
    checks = len(certificate.checks)
    return (
        f"{settings}: {certificate.verdict}, {len(certificate.failed)} of {checks} checks failed; "
        f"{certificate.rollouts:,} responses, {certificate.tokens:,} tokens, {certificate.drafted:,} drafted, "
        f"{certificate.accepted:,} accepted"
    )


def _cell(checks: Sequence[Check]) -> str:
    if not checks:
        return ""
    failed = [check for check in checks if check.outcome == "fail"]
    if not failed:
        refused = next((check for check in checks if check.outcome == "refused"), None)
        if refused is None:
            return "honoured"
        return "refused" if refused.fault is None else f"refused: {_named(refused.fault)}"
    by_fault: dict[str | None, list[str]] = {}
    for check in failed:
        found = by_fault.setdefault(check.fault, [])
        if check.name not in found:
            found.append(check.name)
    return "; ".join(
        f"**fails**: {', '.join(names)}" if fault is None else f"{_named(fault)}: {', '.join(names)}"
        for fault, names in by_fault.items()
    )


def _named(fault: str) -> str:
    """A fault by its public number, where it has one."""
    name, _, number = fault.partition(" ")
    return f"vLLM's fault {number.strip('()')}" if number else f"vLLM's fault `{name}`"
