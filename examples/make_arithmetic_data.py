"""Write the arithmetic data of configs/data, the same bytes every time: python examples/make_arithmetic_data.py [FOLDER]

Sums of two numbers below 50, two digits each. The demonstrations of the warm-up come from a careless teacher, who is
usually off by one or by ten. A policy that imitates the teacher knows how sums work and is seldom right. RL teaches
it the rest.
"""

import argparse
import json
import random
from pathlib import Path

HELD_OUT = 100
COPIES = 2  # demonstrations per prompt
RIGHT = 0.15  # of the demonstrations
DESIRABLE = 0.25  # of the labelled answers
SOLUTIONS = 800
GOOD_STEP = 0.7  # of the steps of a solution
ERRORS = (-1, 1, 10)


def two_digits(number: int) -> str:
    return f"{min(max(number, 0), 99):02d}"


def prompt(a: int, b: int) -> str:
    return f"{two_digits(a)}+{two_digits(b)}="


def wrong(rng: random.Random, total: int) -> str:
    return two_digits(rng.choice([total + error for error in ERRORS if 0 <= total + error <= 99]))


def solution(rng: random.Random, a: int, b: int) -> dict[str, object]:
    """Add the ones, the tens, and both, each step right or wrong."""
    steps = (a % 10 + b % 10, a // 10 * 10 + b // 10 * 10, a + b)
    labels = [rng.random() < GOOD_STEP for _ in steps]
    texts = [two_digits(step) if good else wrong(rng, step) for step, good in zip(steps, labels, strict=True)]
    return {"prompt": prompt(a, b), "completions": texts, "labels": labels}


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} lines")


def main(folder: Path) -> None:
    rng = random.Random(0)
    problems = [(a, b) for a in range(50) for b in range(50)]
    rng.shuffle(problems)
    held_out, train = problems[:HELD_OUT], problems[HELD_OUT:]
    write(folder / "arithmetic_train.jsonl", [{"prompt": prompt(a, b), "answer": two_digits(a + b)} for a, b in train])
    write(
        folder / "arithmetic_held_out.jsonl",
        [{"prompt": prompt(a, b), "answer": two_digits(a + b)} for a, b in held_out],
    )
    careless = [
        {"prompt": prompt(a, b), "answer": two_digits(a + b) if rng.random() < RIGHT else wrong(rng, a + b)}
        for _ in range(COPIES)
        for a, b in train
    ]
    write(folder / "arithmetic_careless.jsonl", careless)
    pairs = [{"prompt": prompt(a, b), "chosen": two_digits(a + b), "rejected": wrong(rng, a + b)} for a, b in train]
    write(folder / "arithmetic_pairs.jsonl", pairs)
    labelled = [(a, b, rng.random() < DESIRABLE) for a, b in train]
    answers = [
        {"prompt": prompt(a, b), "answer": two_digits(a + b) if right else wrong(rng, a + b), "label": right}
        for a, b, right in labelled
    ]
    write(folder / "arithmetic_answers.jsonl", answers)
    write(folder / "arithmetic_solutions.jsonl", [solution(rng, a, b) for a, b in train[:SOLUTIONS]])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    data = Path(__file__).parent.parent / "configs" / "data"
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=data, help="by default configs/data")
    main(parser.parse_args().folder)
