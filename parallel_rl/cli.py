"""The console script: `parallel-rl train (CONFIG | --recipe NAME) [--section.key value ...]`, `... data`, `... recipes`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_rl import __version__
from parallel_rl.cluster import preemption
from parallel_rl.plan import command as plan_command

if TYPE_CHECKING:
    from parallel_rl.plan.models import ModelShape
    from parallel_rl.training.config.sections import ParallelConfig

_ABOUT = "Losses for RL post-training, and a reference trainer on Megatron-core."
# what `submit` hands on by the same name
_SBATCH = (
    *("account", "partition", "qos", "reservation", "constraint", "nodelist", "exclude", "dependency"),
    *("cpus-per-task", "signal", "job-name", "output"),
)
_SHORT = {"A": "account", "C": "constraint", "J": "job-name", "N": "nodes", "c": "cpus-per-task", "d": "dependency"}
_SHORT |= {"o": "output", "p": "partition", "q": "qos", "t": "time", "w": "nodelist", "x": "exclude"}
# what people write for ours
_SYNONYMS = {"gres": "gpus-per-node", "gpus": "gpus-per-node", "ntasks-per-node": "ranks-per-node"}
_SUBMIT = ("recipe", "nodes", "gpus-per-node", "ranks-per-node", "time", *_SBATCH, "dry-run")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 2 for a config, data or world that does not fit."""
    parser = argparse.ArgumentParser("parallel-rl", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"parallel-rl {__version__}")
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
    train.add_argument(
        "--gate",
        metavar="SECONDS",
        type=float,
        help="first, in so many seconds: every rank up, groups formed, one tiny step as in a single process",
    )
    check = commands.add_parser(
        "check",
        help="check a run's config, files and layout in seconds, before it holds any GPU",
        usage="parallel-rl check (CONFIG | --recipe NAME) --world N [--section.key value ...]",
        allow_abbrev=False,
    )
    check.add_argument("--recipe", metavar="NAME", help="one of `parallel-rl recipes`, on the data that ships")
    check.add_argument("--world", metavar="N", type=int, required=True, help="ranks: nodes × GPUs a node")
    _add_submit(commands)
    data = commands.add_parser(
        "data",
        help="check the data of a run and read what its steps read, without a model",
        usage="parallel-rl data (CONFIG | --recipe NAME) [--steps N] [--section.key value ...]",
        description="Says what is wrong with the data of a run, how fast it is read, how full micro-batches are, in how much "
        "memory. Takes the config and the overrides of `parallel-rl train`.",
        allow_abbrev=False,
    )
    data.add_argument("--recipe", metavar="NAME", help="one of `parallel-rl recipes`, on the data that ships")
    data.add_argument("--steps", metavar="N", type=int, help="steps of each phase, in place of the config's")
    plan_command.add_parser(commands)
    commands.add_parser("recipes", help="list the recipes")
    known, rest = parser.parse_known_args(arguments)
    if known.command == "plan":
        return _plan(known, rest)
    if known.command != "recipes" and not _has_megatron():
        needs = f"`parallel-rl {known.command}` needs megatron-core: pip install 'parallel-rl[megatron]'"
        return _refuse(ValueError(needs))
    if known.command == "train":
        if arguments is None:  # the process is ours, and seconds of imports follow
            preemption.listen()
        return _train(known.recipe, rest, known.gate)
    if known.command == "check":
        return _check(known.recipe, known.world, f"{known.world} ranks", rest)
    if known.command == "submit":
        return _submit(known, rest)
    if known.command == "data":
        return _data(known.recipe, known.steps, rest)
    if rest:
        return _refuse(ValueError(f"{rest[0]!r} is not an argument of `parallel-rl recipes`"))
    return _recipes()


def _has_megatron() -> bool:
    try:
        return find_spec("megatron.core") is not None
    except ModuleNotFoundError:  # its parent is not there
        return False


def _add_submit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    submit = commands.add_parser(
        "submit",
        help="check a run and submit it to Slurm",
        usage="parallel-rl submit (CONFIG | --recipe NAME) --nodes N [--gpus-per-node G] [--ranks-per-node R] [--time T] "
        "[--account A] [--partition P] [--SBATCH-OPTION ...] [--dry-run] [--section.key value ...]",
        description="Checks the config against nodes × GPUs, then runs `sbatch slurm/train.sbatch` with the settings of "
        "slurm/site.conf. Prints the command; its copy and the config's go to the run's folder.",
        allow_abbrev=False,
    )
    submit.add_argument("--recipe", metavar="NAME", help="one of `parallel-rl recipes`, on the data that ships")
    submit.add_argument("--nodes", metavar="N", type=int, help="whole nodes")
    submit.add_argument("--gpus-per-node", metavar="G", type=int, help="else the site's, or 8")
    submit.add_argument("--ranks-per-node", metavar="R", type=int, help="else one a GPU")
    submit.add_argument(
        "--time",
        metavar="T",
        help="the limit (8:00:00); ten minutes before it, or a quarter of it, the run saves and is queued again",
    )
    for name in _SBATCH:
        submit.add_argument(f"--{name}", metavar=name[0].upper(), help="as sbatch has it; else the site's")
    submit.add_argument("--dry-run", action="store_true", help="only show the command")


def _submit(known: argparse.Namespace, rest: Sequence[str]) -> int:
    from parallel_rl.cluster.submit import Resources, plan, submit

    arguments = [*([] if known.recipe is None else ["--recipe", known.recipe]), *rest]
    more = {name: value for name in _SBATCH if (value := getattr(known, name.replace("-", "_"))) is not None}
    try:
        _check_options(rest)
        if known.nodes is None:
            raise ValueError("--nodes N is needed: the whole nodes of the job")
        resources = Resources(known.nodes, known.gpus_per_node, known.ranks_per_node, known.time, more)
        job = plan(resources, arguments)
        ranks = f"{known.nodes} nodes × {job.world // known.nodes} = {job.world} ranks"
        if status := _check(known.recipe, job.world, ranks, rest, "submit"):
            return status
        print(job, flush=True)
        if known.dry_run:
            return 0
        import yaml

        from parallel_rl.training.config.load import as_mapping, load_config

        path, overrides = _source(known.recipe, rest, "submit")
        config = load_config(path, overrides)
        text = yaml.safe_dump(as_mapping(config), sort_keys=False)
        print(submit(job, Path(config.run.dir), text))
    except ValueError as error:
        return _refuse(error)
    return 0


def _check_options(rest: Sequence[str]) -> None:
    """Refuses what is meant for `submit` or sbatch and is none of theirs, by its own name and not as a key of the config."""
    from parallel_rl.config.strict import nearest
    from parallel_rl.training.config.train import TrainConfig

    sections, ours = {field.name for field in fields(TrainConfig)}, [f"--{name}" for name in _SUBMIT]
    for word in rest:
        name = word.lstrip("-").partition("=")[0]
        name = _SHORT.get(name[:1], name) if word[:1] == "-" != word[1:2] else _SYNONYMS.get(name, name)
        if word.startswith("-") and name[:1].isalpha() and name.partition(".")[0] not in sections:
            raise ValueError(
                f"{word.partition('=')[0]} is not an option of `parallel-rl submit`; {nearest(f'--{name}', ours)}"
            )


def _plan(known: argparse.Namespace, rest: Sequence[str]) -> int:
    try:
        if rest:
            raise ValueError(f"{rest[0]!r} is not an argument of `parallel-rl plan`")
        return plan_command.run(known, _read_model)
    except (ValueError, OSError) as error:
        return _refuse(error)


def _read_model(path: str) -> ModelShape:
    from parallel_rl.config.yaml_files import read_tree
    from parallel_rl.plan.models import read_model

    if not path.endswith((".yaml", ".yml")) or "model" not in read_tree(Path(path)):
        return read_model(path)
    from parallel_rl.training.config.load import load_config
    from parallel_rl.training.preflight.model_shape import model_shape

    return model_shape(load_config(path))


def _recipes() -> int:
    from parallel_rl.recipes import recipes, runs, summary

    try:
        for name, path in recipes().items():
            print(f"{name:30} {summary(path)}{'' if runs(path) else ' (load_recipe only: `train` lacks its data)'}")
        sys.stdout.flush()
    except BrokenPipeError:  # of `| head`; the interpreter flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _check(recipe: str | None, world: int, ranks: str, rest: Sequence[str], command: str = "check") -> int:
    from parallel_rl.training.config.load import load_config
    from parallel_rl.training.config.sections import data_parallel_size

    try:
        if world < 1:
            raise ValueError(f"--world {world} is not valid; at least 1 is needed")
        config = load_config(*_source(recipe, rest, command), _say)
        data_parallel_size(config.parallel, world)
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
        from parallel_rl.training.preflight.check import check_run

        print(f"ok: {config.objective}, {ranks}, {check_run(config, world)}", flush=True)
    except (ValueError, OSError) as error:  # such as a file that may not be read
        return _refuse(error)
    return 0


def _train(recipe: str | None, rest: Sequence[str], gate: float | None) -> int:
    # torch and Megatron are imported only here, so that --help answers at once.
    from parallel_rl.training.config.load import load_config

    try:
        if gate is not None and not 0 < gate < float("inf"):
            raise ValueError(f"--gate {gate:g} is not valid; seconds above 0 are needed")
        config = load_config(*_source(recipe, rest, "train"), _say)
        _check_world(config.parallel)
    except ValueError as error:
        return _refuse(error)
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")  # of optional packages that are not there
    import torch.distributed as dist

    from parallel_rl.cluster.exit import failed
    from parallel_rl.cluster.watchdog import watching
    from parallel_rl.training.preflight.gate import pass_gate
    from parallel_rl.training.trainer import train

    try:
        with watching(config.run.timeout):
            if gate is not None:
                pass_gate(config, gate)
            train(config)
    except Exception as error:
        return failed(error)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _check_world(layout: ParallelConfig) -> None:
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


def _data(recipe: str | None, steps: int | None, rest: Sequence[str]) -> int:
    from parallel_rl.training.config.load import load_config

    try:
        if steps is not None and steps < 1:
            raise ValueError(f"--steps {steps} is not valid; at least 1 is needed")
        config = load_config(*_source(recipe, rest, "data"), _say)
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
        from parallel_rl.training.preflight.dry_run import dry_run

        for done in dry_run(config, steps, lambda line: print(line, flush=True)):
            print(
                f"{done.phase} step {done.step:,}: {done.records:,} records, {done.tokens:,} tokens in {done.seconds:.1f} s "
                f"({done.records / done.seconds:,.0f} records/s); micro-batches {done.filled:.1%} full; "
                f"{done.memory / 1e6:,.0f} MB of memory",
                flush=True,
            )
    except (ValueError, OSError) as error:
        return _refuse(error)
    return 0


def _source(recipe: str | None, rest: Sequence[str], command: str) -> tuple[str, Sequence[str]]:
    """The config's file, and the overrides."""
    from parallel_rl.recipes import find_recipe

    given = bool(rest) and not rest[0].startswith("--") and (recipe is None or "=" not in rest[0])
    if recipe is not None:
        if given:
            raise ValueError(f"{rest[0]!r} beside --recipe {recipe}: give a config file or a recipe")
        return str(find_recipe(recipe)), rest
    if not given:
        raise ValueError(
            f"there is no config: write parallel-rl {command} CONFIG, or parallel-rl {command} --recipe NAME"
        )
    return rest[0], rest[1:]


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def _refuse(error: ValueError | OSError) -> int:
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    print(f"parallel-rl: error{rank}: {error}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
