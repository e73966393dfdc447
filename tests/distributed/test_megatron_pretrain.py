"""Our callback under a training loop of Megatron-LM's kind: docs/megatron.md's code runs, and its log is the global batch's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.testing.pool import preload, run_world
from tests.distributed.megatron_cases import LENGTHS, Case, make_data, make_loss, make_model, split
from tests.distributed.megatron_oracle import Outcome, oracle
from tests.distributed.megatron_step import step

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")

PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"


def _logged(reports: list[dict[str, Tensor]]) -> dict[str, float]:
    """What the loop makes of its micro-batches' reports: sums of pairs over them and over data × context ranks, divided."""
    from megatron.core import parallel_state

    logged = {}
    for name in reports[0] if reports else {}:
        pair = torch.stack([report[name].view(-1) for report in reports]).sum(0)
        dist.all_reduce(pair, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        logged[name] = (pair[0] / pair[1]).item()
    return logged


def _train_step(rank: int, case: Case) -> tuple[dict[str, float], dict[str, float], float]:
    """The log of one step through the page's code, what `forward_backward` reports of the same, and the gradient's norm."""
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import parallel_rl.megatron as M

    M.initialize(case.tp, case.cp, case.pp)
    [code] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    page: dict[str, object] = {}
    exec(code, page)
    page["loss_fn"] = make_loss(case)
    model = M.wrap_model(make_model(case))
    data_ranks, data_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    rows = len(LENGTHS) // case.micro_batches
    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(rank, None, len(LENGTHS), rows, data_ranks)
    mine = split(make_data(case.data), case.micro_batches)[data_rank::data_ranks]
    model.zero_grad_buffer()
    reports = get_forward_backward_func()(
        forward_step_func=page["forward_step"],
        data_iterator=page["counted"](iter(mine)),  # type: ignore[operator]
        model=[model],
        num_microbatches=len(mine),
        seq_length=mine[0]["input_ids"].shape[1],
        micro_batch_size=rows,
        forward_only=False,
    )
    logged, norm = _logged(reports), M.grad_norm([model]).item()
    calculator.unset_num_microbatches_calculator()
    report, _ = step(case)
    whole = report.floats()
    last = M.is_last_stage()
    M.destroy()
    return logged, whole if last else {}, norm


@pytest.mark.parametrize(
    "case",
    [
        Case(cp=2, micro_batches=6, loss="pg"),
        pytest.param(Case(tp=2, sp=True, micro_batches=6, per_token=False), marks=pytest.mark.slow),
        pytest.param(Case(cp=2, pp=2, loss="pg", data="masked micro-batch"), marks=pytest.mark.slow),
    ],
)
def test_the_code_of_the_page_logs_and_trains_on_the_global_batch(case: Case) -> None:
    """`Metrics` in a report ended `train_step`; a mean over micro-batches of local means would be another number."""
    [[reference]] = run_world(1, oracle, [Case(data=case.data, loss=case.loss)])
    assert isinstance(reference, Outcome)
    seen = 0
    for logged, whole, norm in run_world(4, _train_step, case):
        assert norm == pytest.approx(reference.norm, rel=1e-9)
        for name, value in logged.items():
            assert value == pytest.approx(whole[name], rel=1e-12, abs=1e-15), name
            seen += 1
        left = {name for name in whole if name not in logged} - {"empty_rows"}  # of the step, whatever the loss is
        assert all(name.endswith(("_min", "_max")) or "ess" in name for name in left), left
    assert seen >= 2
