"""Commands on a checkpoint: sample from its policy, or export it as a Hugging Face folder."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from parallel_rl.cli.runs import check_world, config_of, quiet, refuse, say
from parallel_rl.cluster.preemption import failed
from parallel_rl.config.shown import printable


def add_sample(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "sample",
        help="sample answers of a checkpoint's policy, alone or under torchrun",
        usage="parallel-rl sample CHECKPOINT --prompt TEXT [--prompt TEXT ...] [--samples N] [--temperature T] "
        "[--max-new-tokens N] [--seed S] [--config FILE] [--section.key value ...]",
        description="Samples from runs/.../checkpoints/step_N with the run's tokenizer and sampling options. One process holds "
        "the model unless a layout is given, as in torchrun ... sample CHECKPOINT --parallel.tensor 2 --prompt TEXT",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("--prompt", metavar="TEXT", action="append", default=[], help="may be repeated")
    parser.add_argument("--samples", metavar="N", type=int, default=1, help="answers to each prompt (1)")
    parser.add_argument("--temperature", metavar="T", type=float, help="default: the run's; 0 is greedy")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, help="default: the run's")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="seed of the samples (0)")
    parser.add_argument("--config", metavar="FILE", help="the run's config; default: the config.yaml in its folder")


def sample(known: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print answers of a checkpoint's policy; returns the exit status."""
    return _exit_status(partial(_sample, known, rest))


def _sample(known: argparse.Namespace, rest: Sequence[str]) -> None:
    if not known.prompt:
        raise ValueError("there is no prompt: write --prompt TEXT, once for each")
    if known.samples < 1:
        raise ValueError(f"--samples {known.samples} is not valid; at least 1 is needed")
    if known.temperature is not None and not 0 <= known.temperature < math.inf:
        raise ValueError(
            f"--temperature {known.temperature:g} is not valid; 0 (greedy) or a finite number above 0 is needed"
        )
    if not 0 <= known.seed < 2**31:
        raise ValueError(f"--seed {known.seed} is not valid; an integer from 0 to {2**31 - 1} is needed")
    from parallel_rl.training.config.load import load_config

    checkpoint = Path(known.checkpoint).absolute()
    config = load_config(known.config or config_of(known.checkpoint), ["--parallel={}", *rest])
    greedy = known.temperature == 0
    options = {"temperature": None if greedy else known.temperature, "max_new_tokens": known.max_new_tokens}
    sampling = replace(config.sampling, **{name: value for name, value in options.items() if value is not None})
    check_world(config.parallel)
    quiet()
    from parallel_rl.training.checkpointing.export import sample_prompts
    from parallel_rl.training.models.engine import end_world

    answers = sample_prompts(
        config, checkpoint, known.prompt, sampling, samples=known.samples, seed=known.seed, greedy=greedy
    )
    for prompt, texts in zip(known.prompt, answers, strict=True):
        say(printable(prompt))
        for text in texts:
            say("\n".join(f"  {line}" for line in printable(text).split("\n")))
    end_world()


def add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face folder, which transformers and vLLM load",
        usage="parallel-rl export CHECKPOINT OUT [--section.key value ...]",
        description="Reads the run's config.yaml two folders above CHECKPOINT (.../checkpoints/step_000100). One process holds "
        "the whole model on the host; under torchrun give a layout: --parallel.pipeline 4",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("out", metavar="OUT", help="a new folder")


def export(known: argparse.Namespace, rest: Sequence[str]) -> int:
    """Write a checkpoint as a Hugging Face folder; returns the exit status."""
    return _exit_status(partial(_export, known, rest))


def _export(known: argparse.Namespace, rest: Sequence[str]) -> None:
    from parallel_rl.training.config.load import load_config

    checkpoint, out = Path(known.checkpoint), Path(known.out)
    config = load_config(config_of(known.checkpoint), ["--parallel={}", *rest], say)
    check_world(config.parallel)
    quiet()
    from parallel_rl.training.checkpointing.export import export_checkpoint
    from parallel_rl.training.models.engine import end_world

    export_checkpoint(checkpoint, out, config)
    say(f"wrote {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    end_world()


def _exit_status(work: Callable[[], None]) -> int:
    """Call `work`; returns 0, or prints its error and returns the exit status of that."""
    try:
        work()
    except (ValueError, OSError) as error:
        return refuse(error)
    except RuntimeError as error:
        return failed(error)
    return 0
