"""A process that compares answers by math-verify: JSON lines [completion, answer] in, 0 or 1 a line out.

It is run by its path, so that it starts without torch. A power tower keeps sympy busy for ever; who asks ends the process then.
"""

from __future__ import annotations

import json
import logging
import resource
import sys

_MEMORY = 4 << 30  # bytes of addresses, beyond which a number is too large to look at


def equal(completion: str, answer: str) -> bool:
    """Whether the last result in `completion` is `answer`, which may follow "####" (GSM8K) and stand in \\boxed{} or not."""
    from math_verify import parse, verify

    wanted = answer.rsplit("####", 1)[-1].strip()
    wanted = wanted if "\\boxed" in wanted else f"\\boxed{{{wanted.strip('$')}}}"
    # math-verify's own timeouts arm SIGALRM, and do not interrupt a long product of integers
    gold, given = parse(wanted, parsing_timeout=None), parse(completion, parsing_timeout=None)
    return bool(verify(gold, given, timeout_seconds=None))


def main() -> None:
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for line in sys.stdin:
        try:
            verdict = equal(*json.loads(line))
        except Exception:  # whatever sympy makes of a text that is no mathematics
            verdict = False
        print(int(verdict), flush=True)


if __name__ == "__main__":
    main()
