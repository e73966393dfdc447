"""The section `run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parallel_rl.config.strict import at_least
from parallel_rl.training.reporting.loggers import check_loggers


@dataclass(frozen=True)
class RunConfig:
    """Folder, seed, precision and checkpoints of a run.

    Attributes:
        dir: folder of metrics.jsonl, tensorboard/, checkpoints/ and curves.png.
        seed: seed for weight initialisation, data order and sampling.
        dtype: precision of parameters and activations. bfloat16 trains on float32 master weights.
        resume: "auto" continues from the folder's newest checkpoint. "never" starts over and replaces the folder's run; a Slurm
            job does so once and resumes when it is requeued. Files that no run made are never removed: they are an error.
        checkpoint_every: steps between checkpoints; 0 saves after the warm-up and at the end only.
        keep_checkpoints: number of newest checkpoints that are kept.
        keep_every: never delete checkpoints whose step in the phase is a multiple of this (0: none).
        timeout: seconds that a rank waits in one collective. After that the run ends and names the missing rank. Set it above
            the longest time by which ranks may differ, for instance in a slow reward function.
        loggers: tensorboard, wandb, mlflow, trackio, or names that your own module registers (`register_logger`, --import).
            They receive the rows of metrics.jsonl. null: tensorboard, if it is installed.
        init_from: a checkpoint folder (".../step_000100") with the initial weights; relative to the config file. Its checksums
            protect against accidents, not against people.
    """

    dir: str
    seed: int = 0
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    resume: Literal["auto", "never"] = "auto"
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    keep_every: int = 0
    timeout: float = 600.0
    loggers: tuple[str, ...] | None = None
    init_from: str | None = None

    def __post_init__(self) -> None:
        at_least(self, checkpoint_every=0, keep_checkpoints=1, keep_every=0, seed=0, timeout=1)
        check_loggers(self.loggers or ())
        if not self.dir.strip():
            raise ValueError(f"dir = {self.dir!r} is empty; name the folder of the run, as in runs/grpo")
        if self.dir.startswith("~"):
            raise ValueError(f"dir = {self.dir!r} begins with a ~, which only a shell expands; write the whole path")
        for name, most in (("seed", 2**31 - 1), ("timeout", 30 * 86400)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} = {getattr(self, name)} must be at most {most}")
        if self.keep_every and self.checkpoint_every and self.keep_every % self.checkpoint_every:
            raise ValueError(
                f"keep_every = {self.keep_every} must be a multiple of checkpoint_every = {self.checkpoint_every}: others "
                "are hardly ever saved"
            )
