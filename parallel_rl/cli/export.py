"""The command `export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_rl.cli.runs import check_world, config_of, quiet, refuse, say
from parallel_rl.cluster.exit import failed

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
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
    from parallel_rl.training.config.load import load_config

    checkpoint, out = Path(known.checkpoint), Path(known.out)
    try:
        config = load_config(config_of(known.checkpoint), ["--parallel={}", *rest], say)
        check_world(config.parallel)
        quiet()
        from parallel_rl.training.checkpointing.export import export_checkpoint
        from parallel_rl.training.models.engine import end_world

        export_checkpoint(checkpoint, out, config)
        say(f"wrote {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
        end_world()
    except (ValueError, OSError) as error:
        return refuse(error)
    except RuntimeError as error:
        return failed(error)
    return 0
