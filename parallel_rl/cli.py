"""The console script: `parallel-rl train CONFIG [--section.key value ...]`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, or 2 for a config, data or world that does not fit."""
    parser = argparse.ArgumentParser(
        prog="parallel-rl", description="Losses for RL post-training, and a reference trainer on Megatron-core."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train",
        help="train by a YAML config, alone or under torchrun",
        description="Trains by CONFIG. Any key can be overridden: --run.seed 1 --parallel.tensor 2 --grpo.optimizer.lr 1e-4",
        allow_abbrev=False,
    )
    train.add_argument("config", help="YAML file, see configs/")
    known, overrides = parser.parse_known_args(arguments)
    return _train(known.config, overrides)


def _train(path: str, overrides: Sequence[str]) -> int:
    # torch and Megatron are imported only here, so that --help answers at once.
    from parallel_rl.training.config import data_parallel_size
    from parallel_rl.training.load import load_config

    try:
        config = load_config(path, overrides)
        data_parallel_size(config.parallel, int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        return _refuse(error)
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")  # of optional packages that are not there
    import torch.distributed as dist

    from parallel_rl.training.trainer import train

    try:
        train(config)
    except ValueError as error:
        return _refuse(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _refuse(error: ValueError) -> int:
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    print(f"parallel-rl: error{rank}: {error}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
