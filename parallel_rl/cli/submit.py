"""The command that checks a run and submits it to Slurm."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from parallel_rl.cli.loop import read
from parallel_rl.cli.runs import RECIPE, check, refuse, source
from parallel_rl.config.names import left_to_ranks

# options that `submit` passes on under the same name
_SBATCH = (
    *("account", "partition", "qos", "reservation", "constraint", "nodelist", "exclude", "dependency"),
    *("cpus-per-task", "signal", "job-name", "output", "array"),
)
_SHORT = {"A": "account", "C": "constraint", "J": "job-name", "N": "nodes", "c": "cpus-per-task", "d": "dependency"}
_SHORT |= {"o": "output", "p": "partition", "q": "qos", "t": "time", "w": "nodelist", "x": "exclude"}
# common spellings of our options
_SYNONYMS = {"gres": "gpus-per-node", "gpus": "gpus-per-node", "ntasks-per-node": "ranks-per-node"}
_SUBMIT = (
    *("recipe", "script", "nodes", "gpus-per-node", "ranks-per-node", "time", *_SBATCH),
    *("server-nodes", "server-command", "dump-step", "sbatch", "dry-run", "import"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    submit = commands.add_parser(
        "submit",
        help="check a run and submit it to Slurm",
        usage="parallel-rl submit (CONFIG | --recipe NAME | --script LOOP.py) --nodes N [--gpus-per-node G] "
        "[--ranks-per-node R] [--time T] [--array 0-3] [--server-nodes M --server-command C] [--dump-step N] "
        "[--account A] [--partition P] [--SBATCH-OPTION ...] [--dry-run] "
        "[--section.key value ...]",
        description="Checks the config against nodes × GPUs, then runs `sbatch slurm/train.sbatch` with the settings of "
        "slurm/site.conf. Prints the command, and keeps it in the run's folder with the config.",
        allow_abbrev=False,
    )
    submit.add_argument("--recipe", metavar="NAME", help=RECIPE)
    submit.add_argument(
        "--script", metavar="LOOP.py", help="a loop of your own instead of a config; its arguments follow --"
    )
    submit.add_argument("--nodes", metavar="N", type=int, help="number of whole nodes")
    submit.add_argument("--gpus-per-node", metavar="G", type=int, help="default: the site's, or 8")
    submit.add_argument("--ranks-per-node", metavar="R", type=int, help="default: one per GPU")
    submit.add_argument(
        "--time",
        metavar="T",
        help="time limit (8:00:00); ten minutes before it, or in its last quarter, the run saves and is requeued",
    )
    for name in _SBATCH:
        submit.add_argument(f"--{name}", metavar=name[0].upper(), help="passed to sbatch; default: the site's")
    submit.add_argument(
        "--server-nodes", metavar="M", type=int, default=0, help="further nodes, with one server on each"
    )
    submit.add_argument("--server-command", metavar="C", help="starts a server: 'vllm serve FOLDER --port $PORT'")
    submit.add_argument("--dump-step", metavar="N", type=int, help="as for `parallel-rl train`")
    submit.add_argument("--sbatch", metavar="WORDS", help="further options of sbatch: '--gres=gpu:8 --mail-type=END'")
    submit.add_argument("--dry-run", action="store_true", help="only print the command")


def joined(words: Sequence[str]) -> list[str]:
    """Join `--sbatch --gres=gpu:8` to one word: argparse would take the value for an option."""
    arguments = list(words)
    if arguments[:1] == ["submit"] and "--sbatch" in arguments[:-1]:
        at = arguments.index("--sbatch")
        arguments[at : at + 2] = [f"--sbatch={arguments[at + 1]}"]
    return arguments


def submit(known: argparse.Namespace, rest: Sequence[str]) -> int:
    from parallel_rl.cluster import submit as cluster
    from parallel_rl.cluster.submit_checks import check_shared

    more = {name: value for name in _SBATCH if (value := getattr(known, name.replace("-", "_"))) is not None}
    try:
        arguments = _arguments(known, rest)
        overrides = _of_one_task(rest, known.array)
        if known.nodes is None:
            raise ValueError("--nodes N is needed: the whole nodes of the job")
        words = _words(known.sbatch)
        sizes = (known.nodes, known.gpus_per_node, known.ranks_per_node, known.time)
        resources = cluster.Resources(*sizes, more, words, known.server_nodes, known.server_command)
        job = cluster.plan(resources, arguments)
        ranks = f"{known.nodes} nodes × {job.world // known.nodes} = {job.world} ranks"
        if known.script is not None:
            script = Path(known.script)
            folder, texts = Path("runs") / script.stem, {script.name: read(known.script)}
            print(f"ok: {script}, {ranks}", flush=True)
        elif status := check(known.recipe, job.world, ranks, overrides, known.modules, "submit", known.dump_step):
            return status
        else:
            with left_to_ranks(known.modules):
                folder, texts = _record(*source(known.recipe, overrides, "submit"))
        shared = {"LOG_DIR": job.log_dir} | ({} if known.script is not None else {"run.dir": str(folder)})
        local = [check_shared(name, path, known.nodes) for name, path in shared.items()]
        for warning in (*job.warnings, *filter(None, local)):
            print(f"parallel-rl: warning: {warning}", file=sys.stderr, flush=True)
        print(job, flush=True)
        if known.dry_run:
            return 0
        print(cluster.submit(job, folder, texts))
    except ValueError as error:
        return refuse(error)
    return 0


def _arguments(known: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    if known.script is None:
        check_options(rest)
        modules = [word for module in known.modules for word in ("--import", module)]
        dump = [] if known.dump_step is None else ["--dump-step", str(known.dump_step)]
        return [*([] if known.recipe is None else ["--recipe", known.recipe]), *rest, *modules, *dump]
    if known.recipe is not None or known.modules or known.dump_step is not None:
        what = "a config, --recipe, --import and --dump-step"
        raise ValueError(f"--script {known.script} takes the place of {what}; leave those out")
    if rest and rest[0] != "--":
        raise ValueError(
            f"{rest[0]!r} is not an option of `parallel-rl submit`; put the arguments of {known.script} after --"
        )
    return ["--script", known.script, *rest[1:]]


def _of_one_task(rest: Sequence[str], array: str | None) -> list[str]:
    """Return the arguments of an array's first task; ValueError if all its tasks would be the same run."""
    named = any("{task}" in word for word in rest)
    if array is None:
        if named:
            raise ValueError("{task} stands for the index of an array task, but the job is no array; add --array 0-3")
        return [*rest]
    if (first := re.match(r"\d+", array)) is None:
        raise ValueError(f"--array {array} is not valid; numbers as in 0-3, 1,5 or 0-15%4 are needed")
    pairs = zip(["", *rest], rest, strict=False)
    folders = [word for before, word in pairs if before == "--run.dir" or word.startswith("--run.dir=")]
    own_loop = rest[:1] == ["--"]  # whose own arguments follow
    if not own_loop and not any("{task}" in folder for folder in folders):
        raise ValueError(
            f"--array {array}: all tasks would write to the same run.dir; add --run.dir runs/seed-{{task}}"
        )
    return [word.replace("{task}", first[0]) for word in rest]


def _record(path: str, overrides: Sequence[str]) -> tuple[Path, dict[str, str]]:
    import yaml

    from parallel_rl.training.config.load import as_mapping, load_config

    config = load_config(path, overrides)
    return Path(config.run.dir), {"config.yaml": yaml.safe_dump(as_mapping(config), sort_keys=False)}


def _words(text: str | None) -> list[str]:
    try:
        return shlex.split(text or "")
    except ValueError as error:  # a quotation that does not end
        raise ValueError(f"--sbatch {text!r}: {error}") from None


def check_options(rest: Sequence[str]) -> None:
    """Refuse a misspelt option of `submit` or sbatch; the message names it instead of a config key."""
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
