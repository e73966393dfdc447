"""The section `run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parallel_rl.config.strict import at_least
from parallel_rl.training.reporting.loggers import check_loggers


@dataclass(frozen=True)
class RunConfig:
    """The folder, seed, precision and checkpoints of a run.

    Attributes:
        dir: folder of metrics.jsonl, tensorboard/, checkpoints/ and curves.png.
        seed: of the weights, the order of the data and the draws.
        dtype: of parameters and activations; bfloat16 trains on float32 master weights.
        resume: "auto" continues from the folder's newest checkpoint; "never" starts over and replaces what the folder holds
            (a Slurm job does so once; when it is requeued, it goes on); what no run made there is an error, and stays.
        checkpoint_every: steps between checkpoints; 0 saves after the warm-up and at the end only.
        keep_checkpoints: how many of the newest stay.
        keep_every: never delete checkpoints whose step in the phase is a multiple of this (0: none).
        timeout: seconds that a rank waits in one collective; then the run ends and names the rank that did not come. Above the
            longest that ranks may differ: one of them asks a slow reward function, for instance.
        loggers: what takes the rows beside metrics.jsonl: tensorboard, wandb, mlflow, trackio, and what modules register by
            `register_logger` that the command's --import names; null is tensorboard, if it is installed.
        init_from: a checkpoint folder (".../step_000100") whose weights replace the drawn ones; relative to the config file.
            Its checksums are against accidents, not people.
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
