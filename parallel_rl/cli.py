"""The console script: `parallel-rl train (CONFIG | --recipe NAME) [--section.key value ...]`, `parallel-rl recipes`."""

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
        help="train by a YAML config or a recipe, alone or under torchrun",
        usage="parallel-rl train (CONFIG | --recipe NAME) [--section.key value ...]",
        description="Trains by CONFIG, a YAML file (see configs/), or by a recipe. Any key can be overridden: "
        "--run.seed 1 --parallel.tensor 2 --rl.optimizer.lr 1e-4",
        allow_abbrev=False,
    )
    train.add_argument("--recipe", metavar="NAME", help="one of `parallel-rl recipes`, on the data that ships")
    commands.add_parser("recipes", help="list the recipes")
    known, rest = parser.parse_known_args(arguments)
    if known.command == "train":
        return _train(known.recipe, rest)
    if rest:
        return _refuse(ValueError(f"{rest[0]!r} is not an argument of `parallel-rl recipes`"))
    return _recipes()


def _recipes() -> int:
    from parallel_rl.recipes import recipes, summary

    for name, path in recipes().items():
        print(f"{name:30} {summary(path)}")
    return 0


def _train(recipe: str | None, rest: Sequence[str]) -> int:
    # torch and Megatron are imported only here, so that --help answers at once.
    from parallel_rl.training.load import load_config
    from parallel_rl.training.sections import data_parallel_size

    try:
        path, overrides = _source(recipe, rest)
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


def _source(recipe: str | None, rest: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The config's file, and the overrides."""
    from parallel_rl.recipes import find_recipe

    given = bool(rest) and not rest[0].startswith("--")
    if recipe is not None:
        if given:
            raise ValueError(f"{rest[0]!r} beside --recipe {recipe}: give a config file or a recipe")
        return str(find_recipe(recipe)), rest
    if not given:
        raise ValueError("there is no config: write parallel-rl train CONFIG, or parallel-rl train --recipe NAME")
    return rest[0], rest[1:]


def _refuse(error: ValueError) -> int:
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    print(f"parallel-rl: error{rank}: {error}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
