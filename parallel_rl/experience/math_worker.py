"""Process that compares answers by math-verify: JSON lines [completion, answer] in, 0 or 1 a line out.

Run by its path, to start without torch; the caller kills it if sympy never ends.
"""

from __future__ import annotations

import json
import logging
import resource
import sys

_MEMORY = 4 << 30  # bytes of address space: larger numbers are not examined


def equal(completion: str, answer: str) -> bool:
    """Return whether the completion's last result is `answer`, perhaps after "####" or in \\boxed{}."""
    from math_verify import parse, verify

    wanted = answer.rsplit("####", 1)[-1].strip()
    wanted = wanted if "\\boxed" in wanted else f"\\boxed{{{wanted.strip('$')}}}"
    # math-verify's timeouts use SIGALRM, and do not interrupt a long product of integers
    gold, predicted = parse(wanted, parsing_timeout=None), parse(completion, parsing_timeout=None)
    return bool(verify(gold, predicted, timeout_seconds=None))


def main() -> None:
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for line in sys.stdin:
        try:
            verdict = equal(*json.loads(line))
        except Exception:  # sympy on a text that is no mathematics
            verdict = False
        print(int(verdict), flush=True)


if __name__ == "__main__":
    main()
