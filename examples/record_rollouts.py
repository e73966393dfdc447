"""Record configs/data/arithmetic_rollouts.jsonl, in float64 and in one process: python examples/record_rollouts.py [FILE]

The file has 20 steps of 8 prompts × 4 samples by a policy that learns meanwhile. Training on it (`data.rollouts`)
needs no sampling.
"""

import argparse
import tempfile
from pathlib import Path

from parallel_rl.training.config.load import load_config
from parallel_rl.training.trainer import train

ROOT = Path(__file__).parent.parent


def main(file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        overrides = {
            "run": f"{{dir: {folder}, dtype: float64}}",
            "parallel": "{}",
            "evaluation": "null",
            "data.held_out": "null",
            "warmup.steps": 100,
            "rl.steps": 20,
            "rl.prompts": 8,
            "rl.group_size": 4,
            "rl.record": "true",
        }
        train(
            load_config(
                str(ROOT / "configs/grpo_arithmetic.yaml"), [f"--{key}={value}" for key, value in overrides.items()]
            )
        )
        steps = sorted((Path(folder) / "rollouts").iterdir())
        file.write_text("".join(step.read_text(encoding="utf-8") for step in steps), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    default = ROOT / "configs/data/arithmetic_rollouts.jsonl"
    parser.add_argument(
        "file", metavar="FILE", nargs="?", type=Path, default=default, help="by default that of configs/data"
    )
    main(parser.parse_args().file)
