"""Commands on a run's config: train, check, data; and the recipes."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_rl.config.names import left_to_ranks
from parallel_rl.config.strict import closest

if TYPE_CHECKING:
    from parallel_rl.training.config.sections import ParallelConfig

RECIPE = "one of `parallel-rl recipes`, on the data included with the package"
# megatron-core 0.19 logs at each model and each checkpoint what its caller cannot change
_DEPRECATES = ("megatron.core.models.gpt.gpt_model", "megatron.core.dist_checkpointing.strategies.common")


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = commands.add_parser(
        "train",
        help="train by a YAML config or a recipe, alone or under torchrun",
        usage="parallel-rl train (CONFIG | --recipe NAME) [--section.key value ...]",
        description="Trains by CONFIG, a YAML file (see configs/), or by a recipe. Any key can be overridden: "
        "--run.seed 1 --parallel.tensor 2 --rl.optimizer.lr 1e-4. `parallel-rl train --help rl.server` describes a key or a "
        "section.",
        allow_abbrev=False,
    )
    train.add_argument("--recipe", metavar="NAME", help=RECIPE)
    train.add_argument(
        "--gate",
        metavar="SECONDS",
        type=float,
        nargs="?",
        const=300.0,
        help="before the first step, check that the process groups form and that the run's loss equals one process's, within "
        "SECONDS (300) of the last rank's start",
    )
    train.add_argument(
        "--dump-step",
        metavar="N",
        type=int,
        help="write the main phase's N-th optimizer step for `parallel-rl explain`",
    )
    train.add_argument(
        "--print-config",
        action="store_true",
        help="print the whole config, each value with its source, and train nothing",
    )
    check = commands.add_parser(
        "check",
        help="check a run's config, files and layout in seconds, before it holds any GPU",
        usage="parallel-rl check (CONFIG | --recipe NAME) --world N [--section.key value ...]",
        allow_abbrev=False,
    )
    check.add_argument("--recipe", metavar="NAME", help=RECIPE)
    check.add_argument("--world", metavar="N", type=int, required=True, help="number of ranks: nodes × GPUs per node")
    check.add_argument("--dump-step", metavar="N", type=int, help="as for `parallel-rl train`")
    data = commands.add_parser(
        "data",
        help="check the data of a run and read what its steps would read, without a model",
        usage="parallel-rl data (CONFIG | --recipe NAME) [--steps N] [--section.key value ...]",
        description="Checks the data of a run, and reports reading speed, how full micro-batches are, and memory. Takes the "
        "config and the overrides of `parallel-rl train`.",
        allow_abbrev=False,
    )
    data.add_argument("--recipe", metavar="NAME", help=RECIPE)
    data.add_argument("--steps", metavar="N", type=int, help="steps of each phase; default: the config's")


def add_recipes(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("recipes", help="list the recipes, or print one")
    parser.add_argument("name", metavar="NAME", nargs="?", help="print this recipe: formula, paper, defaults, settings")


def check(
    recipe: str | None,
    world: int,
    ranks: str,
    rest: Sequence[str],
    modules: Sequence[str],
    command: str = "check",
    dump_step: int | None = None,
) -> int:
    """Check a run without importing `modules`, which the ranks will."""
    with importing():
        from parallel_rl.training.config.load import load_config
        from parallel_rl.training.config.sections import data_parallel_size

    try:
        if world < 1:
            raise ValueError(f"--world {world} is not valid; at least 1 is needed")
        with left_to_ranks(modules) as left:
            config = load_config(*source(recipe, rest, command), say)
            data_parallel_size(config.parallel, world)
            quiet()
            with importing():
                from parallel_rl.training.algorithms.phases import check_dump
                from parallel_rl.training.preflight.check import check_run

            check_dump(config, dump_step)
            summary = check_run(config, world)
        print("\n".join([f"ok: {config.objective}, {ranks}, {summary}", *left]), flush=True)
    except (ValueError, OSError) as error:  # such as an unreadable file
        return refuse(error)
    return 0


def train(recipe: str | None, rest: Sequence[str], gate: float | None, dump_step: int | None = None) -> int:
    # torch and Megatron are imported only here, so that --help answers at once.
    with importing():
        from parallel_rl.training.config.load import load_config

    try:
        if gate is not None and not 0 < gate < float("inf"):
            raise ValueError(f"--gate {gate:g} is not valid; seconds above 0 are needed")
        config = load_config(*source(recipe, rest, "train"), say)
        check_world(config.parallel)
    except ValueError as error:
        return refuse(error)
    quiet()
    # Megatron's distributed optimizer asks views of parameters for their gradient
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    with importing():
        from parallel_rl.cluster.preemption import failed
        from parallel_rl.cluster.watchdog import watching
        from parallel_rl.training.models.engine import end_world
        from parallel_rl.training.preflight.gate import pass_gate
        from parallel_rl.training.trainer import train

    try:
        with watching(config.run.timeout):
            if gate is not None:
                pass_gate(config, gate)
            train(config, dump_step)
    except (Exception, SystemExit) as error:  # the status is 0 only when the run is done
        return failed(error)
    end_world()
    return 0


def check_world(layout: ParallelConfig) -> None:
    from parallel_rl.training.config.sections import data_parallel_size

    try:
        data_parallel_size(layout, int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        if "WORLD_SIZE" in os.environ:
            raise
        ranks = layout.tensor * layout.context * layout.pipeline * (layout.data or 1)
        raise ValueError(
            f"{error}: start it by torchrun --nproc-per-node {ranks}, or as one process with --parallel '{{}}'"
        ) from None


def data(recipe: str | None, steps: int | None, rest: Sequence[str]) -> int:
    from parallel_rl.training.config.load import load_config

    try:
        if steps is not None and steps < 1:
            raise ValueError(f"--steps {steps} is not valid; at least 1 is needed")
        config = load_config(*source(recipe, rest, "data"), say)
        quiet()
        from parallel_rl.training.preflight.dry_run import dry_run

        for done in dry_run(config, steps, lambda line: print(line, flush=True)):
            trees = "" if done.trees is None else f", {done.trees.describe(done.tokens)},"
            print(
                f"{done.phase} step {done.step:,}: {done.records:,} records, {done.tokens:,} tokens{trees} "
                f"in {done.seconds:.1f} s ({done.records / done.seconds:,.0f} records/s); "
                f"micro-batches {done.filled:.1%} full; {done.memory / 1e6:,.0f} MB of memory",
                flush=True,
            )
    except (ValueError, OSError) as error:
        return refuse(error)
    return 0


def source(recipe: str | None, rest: Sequence[str], command: str) -> tuple[str, Sequence[str]]:
    """Return the path of the config file and the overrides."""
    from parallel_rl.recipes import find_recipe, recipes

    named = bool(rest) and not rest[0].startswith("--") and (recipe is None or "=" not in rest[0])
    if recipe is not None:
        if named:
            raise ValueError(f"{rest[0]!r} and --recipe {recipe} are both given: name a config file or a recipe")
        return str(find_recipe(recipe)), rest
    if not named:
        raise ValueError(
            f"there is no config: write parallel-rl {command} CONFIG, or parallel-rl {command} --recipe NAME"
        )
    if "." not in rest[0] and not os.path.exists(rest[0]) and (near := closest(rest[0], recipes())):
        raise ValueError(f"the config file {rest[0]} does not exist; for the recipe write --recipe {near}")
    return rest[0], rest[1:]


def config_of(checkpoint: str) -> str:
    """Find the config file of a checkpoint; ValueError without a config or a checkpoint."""
    folder = Path(checkpoint).absolute()
    file = folder.parent.parent / "config.yaml"
    if not folder.is_dir() or not file.is_file():
        missing = f"{file} does not" if folder.is_dir() else f"the folder {folder} does not"
        raise ValueError(
            f"{checkpoint} is not a run's checkpoint, such as runs/grpo/checkpoints/step_000100: {missing} exist"
        )
    return str(file)


def import_modules(names: Sequence[str]) -> None:
    """Import the user's modules, also from the working folder; ValueError if one fails or exits."""
    for name in names:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            import_module(name)
        except (Exception, SystemExit) as error:  # whatever the module does when it is imported
            raise ValueError(f"--import {name} failed: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable gc while importing torch and Megatron; it costs a sixth of the import."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def quiet() -> None:
    """Hide what libraries print about missing optional packages and their own deprecations."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    for name in _DEPRECATES:
        logging.getLogger(name).addFilter(_is_no_deprecation)


def _is_no_deprecation(record: logging.LogRecord) -> bool:
    return "deprecated" not in record.getMessage().lower()


def say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def refuse(error: ValueError | OSError) -> int:
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    print(f"parallel-rl: error{rank}: {error}", file=sys.stderr, flush=True)
    return 2


def recipes(name: str | None) -> int:
    """List the recipes, or print the page of one: its formula, paper, defaults and settings."""
    from parallel_rl.recipes import find_recipe, recipes, runs, summary

    if name is not None:
        try:
            show(find_recipe(name).read_text(encoding="utf-8").rstrip())
        except ValueError as error:
            return refuse(error)
        return 0
    for recipe, path in recipes().items():
        show(f"{recipe:30} {summary(path)}{'' if runs(path) else ' (load_recipe only: `train` lacks its data)'}")
    return 0


def show(text: str) -> None:
    """Print for a reader who may leave early."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # of `| head`
        discard_output()


def discard_output() -> None:
    """Send further standard output nowhere, the interpreter's last flush included."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
