"""Words of the command line that no option takes: the message names the option that does, and guesses only what is alike."""

from __future__ import annotations

import pytest

from parallel_rl.cli import main
from tests.training.helpers import CONFIGS

GRPO = str(CONFIGS / "grpo_arithmetic.yaml")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("verify grpo", "'grpo' is not an argument of `parallel-rl verify`; for the loss of this recipe write --config"),
        ("verify my_losses.py", "; for a loss of that file write --loss my_losses:NAME"),
        ("verify clipped_pg", "; for a loss write --loss clipped_pg"),
        (f"verify {GRPO}", f"; write --config {GRPO}"),
        ("recipes dapo grpo", "; for this recipe write parallel-rl train --recipe grpo"),
        ("recipes gpro", "there is no recipe 'gpro'; did you mean 'grpo'?"),
        (f"check {GRPO} --nproc 4", "--nproc is not an option of `parallel-rl check`; did you mean '--world'?"),
        (f"train {GRPO} --nproc 4", "--nproc is not an option of `parallel-rl train`; torchrun --nproc-per-node N"),
        ("plan --tokns 8", "--tokns is not an option of `parallel-rl plan`; did you mean '--tokens'?"),
        ("train --bogus 1", "--bogus is not an option of `parallel-rl train`"),
        ("data --fast", "--fast is not an option of `parallel-rl data`"),
        ("trian", "there is no command 'trian'; did you mean 'train'?"),
        ("xyzzy", "there is no command 'xyzzy'; choose "),
        ("train --recipe nope", "there is no recipe 'nope'; `parallel-rl recipes` lists them"),
        ("train --recipe gpro", "there is no recipe 'gpro'; did you mean 'grpo'?"),
        ("train grpo", "the config file grpo does not exist; for the recipe write --recipe grpo"),
    ],
)  # fmt: skip
def test_a_word_that_no_option_takes(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(line.split())
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2 and message in capsys.readouterr().err
