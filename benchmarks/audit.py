"""How often the audit cries wolf, and what it catches: audits of right engines by seed, and of every broken one.

python benchmarks/audit.py alarms --runs 300    # ten audits of each by default
python benchmarks/audit.py broken               # at the default size of the audit: half an hour
"""

import argparse
import sys
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from broken.registry import BROKEN, CONTROLS
from paceline.audit.run import audit
from paceline.audit.stats import clopper_pearson
from paceline.audit.subject import ToySubject
from paceline.audit.verdict import ALPHA


def subject(target):
    """The audit's subject for a target of the registry."""
    keyed = getattr(target, "base", target.name) == "paceline"
    options = {"make_params": target.make_params} if hasattr(target, "make_params") else {}
    return ToySubject(target.build, name=target.name, keyed=keyed, **options)


def alarms(runs: int, scale: float, first: int, names: list[str]) -> dict:
    """Audits of the controls with different seeds; every failure is a false alarm."""
    found = {}
    for name in names:
        failed, started = [], time.process_time()
        for seed in range(first, first + runs):
            certificate = audit(subject(CONTROLS[name]), seed=seed, scale=scale)
            if certificate.verdict != "lossless":
                failed.append([seed, certificate.message, [check.says for check in certificate.failed]])
        low, high = clopper_pearson(len(failed), runs)
        found[name] = {"runs": runs, "alarms": len(failed), "interval": [low, high], "failed": failed}
        each = (time.process_time() - started) / runs
        print(f"{name:<20} {len(failed)} of {runs} audits raised an alarm, 95 % interval {low:.2%} to {high:.2%}, "
              f"{each:.1f} CPU-s each", flush=True)  # fmt: skip
        for seed, message, says in failed:
            print(f"    seed {seed}: {message}; {says}", flush=True)
    return found


def broken(seed: int) -> dict:
    """The whole default audit of every control and of every broken engine."""
    found = {}
    for target in [*CONTROLS.values(), *BROKEN.values()]:
        started = time.process_time()
        certificate = audit(subject(target), seed=seed)
        names = sorted({check.name for check in certificate.failed})
        least = min((check.adjusted for check in certificate.checks if check.adjusted is not None), default=1.0)
        found[target.name] = {"verdict": certificate.verdict, "failed": names, "least_adjusted_p": least}
        row = getattr(target, "row", "right")
        print(f"{row:<6} {target.name:<26} {certificate.verdict:<13} {', '.join(names) or '-':<70} "
              f"{time.process_time() - started:5.0f} CPU-s", flush=True)  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="alarms", choices=("alarms", "broken"))
    parser.add_argument("--runs", type=int, default=10, help="audits a control, each with its own seed")
    parser.add_argument("--scale", type=float, default=0.1, help="multiplies the number of requests")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--control", action="append", choices=tuple(CONTROLS), help="only this control")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"family-wise level {ALPHA}")
    if options.what == "alarms":
        found = alarms(
            options.runs, options.scale, options.first, options.control or ["paceline", "paceline-rejection"]
        )
    else:
        found = broken(options.first)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


if __name__ == "__main__":
    main()
