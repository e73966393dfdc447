"""Look up known vulnerabilities of the packages in .venv: python -m tools.audit [--required]

Exit status 0: none is known, or the advisories cannot be had, which is said (with --required: 1).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import distributions

_OWN = "parallel-rl"
_PROBE = "pip==23.2.1"  # any version that an index has advisories for
_LIMIT = 300.0  # seconds


def installed() -> list[str]:
    """List installed packages as name==version, without local build labels, which advisories lack."""
    found = {one.metadata["Name"].lower(): one.version for one in distributions()}
    return [f"{name}=={version.partition('+')[0]}" for name, version in sorted(found.items()) if name != _OWN]


def ask(requirements: Sequence[str]) -> list[dict]:
    """Return pip-audit's report of each: name, version, vulns, or why it was skipped.

    Raises:
        OSError: the advisories cannot be had.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements))
        file.flush()
        command = [sys.executable, "-m", "pip_audit", "-r", file.name, "--no-deps", "--disable-pip", "-f", "json"]
        try:
            done = subprocess.run(  # nosec B603 # no shell
                [*command, "--progress-spinner", "off"], capture_output=True, text=True, timeout=_LIMIT
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no answer in {_LIMIT:g} s") from None
    try:
        report: list[dict] = json.loads(done.stdout)["dependencies"]
    except ValueError:
        raise OSError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]) from None
    return report


def main(required: bool) -> int:
    try:
        [probe] = ask([_PROBE])
        if "skip_reason" in probe:
            raise OSError(probe["skip_reason"])
        report = ask(installed())
    except OSError as error:
        word = "FAILED" if required else "SKIPPED, nothing was looked up"
        print(f"audit: {word}: the advisories cannot be had: {error}", file=sys.stderr)
        return int(required)
    return summary(report)


def summary(report: Sequence[dict]) -> int:
    """Print each vulnerability and a line on all; return the exit status."""
    unknown = [one["name"] for one in report if "skip_reason" in one]
    found = [(one, vulnerability) for one in report for vulnerability in one.get("vulns", ())]
    for one, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"{one['name']} {one['version']}: {vulnerability['id']}, fixed in {fixed}", file=sys.stderr)
    left_out = f"; without an answer: {', '.join(unknown)}" if unknown else ""
    print(f"audit: {len(found)} known vulnerabilities in {len(report) - len(unknown)} packages{left_out}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main("--required" in sys.argv[1:]))
