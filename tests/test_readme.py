"""The README: short, and every block of it runs and prints what it says."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import torch

from parallel_rl.testing.pool import preload, run_world
from tests.training.helpers import ROOT
from tools import law_figure

preload("parallel_rl.megatron")
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
ONE, TWO, MEGATRON, OBJECTIVE = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
ON_ONE, ON_TWO = (block.splitlines() for block in re.findall(r"^```text\n(.*?)^```", TEXT, re.M | re.S))


def run(code: str, names: dict[str, object] | None = None) -> tuple[list[str], dict[str, object]]:
    """The lines that a block prints, and the names that it leaves."""
    names, printed = dict(names or {}), io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), names)
    return printed.getvalue().splitlines(), names


def on_two_ranks(rank: int) -> list[str]:
    _, names = run(ONE)
    return run(TWO.replace('dist.init_process_group("gloo")', ""), names)[0]  # the pool has joined already


def in_a_megatron_loop(rank: int) -> list[str]:
    from parallel_rl import megatron as m

    _, names = run(ONE)
    m.initialize(2, 2)
    config = m.build_config(num_layers=1, hidden_size=16, num_attention_heads=2, sequence_parallel=True)
    model = m.wrap_model(m.build_model(config, vocab_size=32, max_sequence_length=12))
    weight = next(model.parameters())
    before = weight.detach().clone()
    lines, _ = run(MEGATRON, {**names, "model": model, "loader": [[names["data"]]] * 2})
    assert not torch.equal(weight, before), "the weights stand still"
    return lines


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 150


def test_the_loss_on_one_process() -> None:
    assert run(ONE)[0] == ON_ONE


def test_two_ranks_print_the_same_number() -> None:
    assert [line for lines in run_world(2, on_two_ranks) for line in lines] == ON_TWO
    assert ON_ONE[0].split(",")[0] in ON_TWO[0]


def test_the_megatron_loop() -> None:
    lines = run_world(4, in_a_megatron_loop)
    assert lines[0] == lines[1] == lines[2] == lines[3] and len(lines[0]) == 2


def test_the_objective() -> None:
    from parallel_rl import count_valid, get_loss
    from parallel_rl.losses import registry

    _, names = run(ONE)
    run(OBJECTIVE)
    try:
        loss, _ = get_loss("reinforce")()(names["logits"], names["data"], *count_valid(names["data"]))
    finally:
        registry._LOSSES.pop("reinforce")
    logprobs = names["logits"][:, :-1].log_softmax(-1).gather(-1, names["data"]["input_ids"][:, 1:, None])[..., 0]
    mask = names["data"]["token_mask"][:, 1:]
    expected = -(mask * names["data"]["advantages"][:, 1:] * logprobs).sum() / mask.sum()
    torch.testing.assert_close(loss, expected)


@pytest.mark.slow
def test_the_figure_of_the_law() -> None:
    """What the figure shows is true: one number here, others there."""
    found = run_world(law_figure.WORLD, law_figure.all_losses)[0]
    one = found[law_figure.Layout()].ours
    assert all(losses.ours == pytest.approx(one, rel=1e-12) for losses in found.values())
    apart = [layout for layout, losses in found.items() if abs(losses.local_means / one - 1) > 0.01]
    assert apart == [layout for layout in found if (layout.cp, layout.dp, layout.micro_batches) != (1, 1, 1)]
