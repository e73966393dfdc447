"""docs/megatron_loop.md: its code runs on each layout of two ranks, and its two schedules give one loss and one gradient."""

from __future__ import annotations

import pydoc
import re
import warnings
from pathlib import Path

import pytest
import torch

from parallel_rl.testing.pool import preload, run_world
from parallel_rl.validation import get_validation
from tests.distributed.megatron_cases import VOCAB, Case, make_data, make_model, split

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")

PAGE = Path(__file__).parents[2] / "docs" / "megatron_loop.md"


def _run_the_page(rank: int, layouts: list[dict[str, int]]) -> list[dict[str, float]]:
    """Loss and gradient norm of the page's last step by `forward_backward`, and of the same rows packed in its own schedule."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import parallel_rl.megatron as M

    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    found = []
    for sizes in layouts:
        M.initialize(**sizes)
        case = Case(pp=2, chunks=2) if "virtual_pp" in sizes else Case(**sizes)
        places = range(case.chunks) if case.chunks > 1 else [None]
        models = [M.wrap_model(make_model(case, torch.float32, chunk=place)) for place in places]
        rows = [
            {name: x for name, x in batch.items() if name != "prev_logprobs"} for batch in split(make_data("ragged"), 2)
        ]
        for batch in rows:
            batch["advantages"] = batch["advantages"].float()
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.0, clip_grad=0.0), models)
        page: dict[str, object] = {"models": models, "optimizer": optimizer, "loader": [rows] * 3}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for block in code:
                exec(compile(block, str(PAGE), "exec"), page)
        assert not [each for each in said if "logprobs" in str(each.message)] and get_validation() == "auto"
        numbers = {"loss": page["report"].floats()["loss"], "norm": M.grad_norm(models).item()}  # type: ignore[attr-defined]
        scored = [batch.data for batch in page["batches"]]  # type: ignore[attr-defined]
        for name, head in (("packed", page["head"]), ("packed logits", None)):
            if head is None:
                page["head"].remove()  # type: ignore[attr-defined]
            for chunk in models:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            metrics = page["train_step"](models, scored, head)  # type: ignore[operator]
            numbers[f"{name} norm"] = M.grad_norm(models).item()
            if metrics is not None:
                numbers[f"{name} loss"] = metrics["loss"].item()
        found.append(numbers)
    M.destroy()
    return found


@pytest.mark.slow
def test_the_code_of_the_page_gives_one_number_in_both_schedules_on_each_layout() -> None:
    assert "VOCAB = 31 " in PAGE.read_text(encoding="utf-8") and VOCAB == 31
    ranks = run_world(2, _run_the_page, [{"pp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2, "virtual_pp": 2}])
    assert ranks[0][0]["norm"] > 1e-3 and abs(ranks[0][0]["loss"]) > 1e-3
    for numbers in ranks:
        for i, of_layout in enumerate(numbers):
            first = ranks[0][3 if i == 3 else 0]  # the model of virtual stages has more layers
            assert of_layout["loss"] == pytest.approx(first["loss"], rel=1e-4), i
            for name, value in of_layout.items():
                assert value == pytest.approx(first[name.split()[-1]], rel=1e-3), (i, name)
    assert all("packed loss" in numbers for numbers in ranks[1])  # the last stage of PP 2 among them


def _help(rank: int) -> str:
    import parallel_rl.megatron as M

    return pydoc.plain(pydoc.render_doc(M))


def test_help_begins_with_the_functions() -> None:
    """It printed 4,495 lines, 4,000 of them what modules and named tuples inherit, before the first function."""
    [text] = run_world(1, _help)
    assert "\nCLASSES" not in text and "    forward_backward(" in text
    assert len(text.splitlines()) < 800
