"""What the data alone tells of a step is counted without a forward, on every rank alike, and is what the loss then sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel_rl import LossFn, ParallelGroups, Statistics, count_valid, get_loss, register_objective
from parallel_rl.losses import Field, NoConfig, Requirements
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.metrics import Metrics
from parallel_rl.testing.batches import VOCAB, make_batch
from parallel_rl.testing.pool import WorldError, preload, run_world

preload("parallel_rl", "tests.distributed.law")

KEPT = {"rules": [{"statistic": "k1", "low": 0.8, "high": 1.2}], "denominator": "kept"}
PRM = {"placeholder_token_id": 21, "reward_token_ids": (19, 2)}


@dataclass(frozen=True)
class Counted:
    """A loss that used to cost a forward before the step."""

    loss: str
    config: dict[str, Any]
    options: dict[str, Any]
    counted: bool
    collected: bool


LOSSES = [
    Counted("nll", {}, {}, False, False),
    Counted("mix", {}, {}, True, False),
    Counted("prm", PRM, {}, True, False),
    Counted("clipped_pg", {"positive_example_nll_weight": 0.1}, {}, True, False),
    Counted("policy", {"positive_nll_weight": 0.1}, {}, True, False),
    Counted("policy", {"rejection": KEPT}, {}, True, False),
    Counted("policy", {"importance": {"normalize": True}}, {}, True, False),
    # what the present policy decides
    Counted("policy", {"rejection": KEPT, "on_policy": True}, {}, False, True),
    Counted("policy", {"rejection": KEPT}, {"top_k": 5}, False, True),
    Counted("policy", {"entropy_filter": 0.5, "positive_nll_weight": 0.1}, {}, True, True),
    Counted("mix", {"policy": {"entropy_filter": 0.5}}, {}, True, True),
    Counted("kto", {}, {}, False, True),
]


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_only_what_the_policy_decides_costs_a_forward(case: Counted) -> None:
    loss_fn = get_loss(case.loss)(case.config, **case.options)
    assert loss_fn.needs_statistics == (case.counted or case.collected)
    assert loss_fn.needs_collect == case.collected
    data = make_batch(3, False, case.loss, torch.float64).data
    assert bool(dict(loss_fn.count(data))) == case.counted


def test_survivors_of_a_rejection_by_hand() -> None:
    """Counted over all rows before the step, whatever the dtype of the logits is later."""
    config = {"rejection": {"rules": [{"statistic": "k1", "low": 0.8, "high": 1.2}], "denominator": "kept"}}
    data = make_batch(3, False, "policy", torch.float64).data
    rows = [{name: value[i : i + 1] for name, value in data.items()} for i in range(12)]
    counted = get_loss("policy")(config).count(rows)
    tokens = sequences = 0
    for i in range(12):
        kept = 0
        for t in range(1, 16):
            ratio = math.exp(float(data["prev_logprobs"][i, t]) - float(data["generation_logprobs"][i, t]))
            kept += bool(data["token_mask"][i, t]) and bool(data["sample_mask"][i]) and 0.8 <= ratio <= 1.2
        tokens, sequences = tokens + kept, sequences + (kept > 0)
    assert 0 < tokens < int(count_valid(data).toks)
    assert (counted["kept_tokens"], counted["kept_sequences"]) == (tokens, sequences)


class Rows(LossFn[NoConfig]):
    """Counts tokens by an id of the row."""

    config_class = NoConfig
    requirements = Requirements((Field("sample_ids", per="sequence", dtype="integer"),), counted=True)

    def count_from(self, batch: TokenBatch) -> Statistics:
        number = batch.tokens_per_sequence
        return Statistics({"tokens": number.sum()}, {}, {"ids": batch.local.data["sample_ids"], "number": number})

    def compute(self, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
        return batch.logprobs.sum(), Metrics({})


def test_records_keep_every_bit_of_an_id() -> None:
    data = make_batch(3, False, "nll", torch.float64).data
    data["sample_ids"] = data["sample_ids"] + (1 << 60)
    counted = Rows().count(
        [{name: value[rows] for name, value in data.items()} for rows in (slice(0, 5), slice(5, 12))]
    )
    assert torch.equal(counted.records["ids"], data["sample_ids"])
    assert int(counted.records["number"].sum()) == int(count_valid(data).toks) == int(counted["tokens"])


def count_on(rank: int) -> tuple[float, list[int], list[int], float]:
    """Data rank 0 has rows 0 to 3, rank 1 none, rank 2 the others in two micro-batches."""
    group = dist.new_group(list(range(3)))
    data = make_batch(3, False, "mix", torch.float64).data
    cuts = {0: [slice(0, 4)], 1: [], 2: [slice(4, 5), slice(5, 12)]}[rank]
    mine = [{name: value[rows] for name, value in data.items()} for rows in cuts]
    counted = Rows().count(mine, group)
    both = get_loss("mix")({"policy": {"rejection": KEPT}}).count(mine, group)
    records = counted.records
    return (
        counted["tokens"].item(),
        records["ids"].tolist(),
        records["number"].tolist(),
        both["usual/kept_tokens"].item(),
    )


def test_ranks_with_different_numbers_of_rows_and_without_any_know_the_same() -> None:
    data = make_batch(3, False, "mix", torch.float64).data
    alone, both = Rows().count(data), get_loss("mix")({"policy": {"rejection": KEPT}}).count(data)
    want = alone["tokens"].item(), alone.records["ids"].tolist(), alone.records["number"].tolist()
    for found in run_world(3, count_on, timeout=60):
        assert found == (*want, both["usual/kept_tokens"].item())


def refused_on(rank: int) -> None:
    data = make_batch(3, False, "mix", torch.float64).data
    if rank == 1:
        del data["expert_mask"]
    get_loss("mix")().count([data], dist.new_group([0, 1]))


def test_bad_data_of_one_rank_is_refused_on_all() -> None:
    with pytest.raises(WorldError, match="rank 1: data lacks the field 'expert_mask'") as error:
        run_world(2, refused_on, timeout=60)
    assert str(error.value).count("ValueError") >= 2


def test_a_users_objective_counts() -> None:
    @register_objective(
        "doc_counted",
        sequence_fields=("rewards",),
        count=lambda batch: Statistics({"sum": batch.per_sequence("rewards").sum()}),
    )
    def Centred(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        return -logprobs * batch.expand(batch.per_sequence("rewards") - batch.statistics["sum"] / batch.counts.seqs)

    logits, data, _ = make_batch(3, False, "nll", torch.float64)
    loss_fn, counts = Centred(vocab_size=VOCAB), count_valid(data)
    loss, _ = loss_fn(logits, data, *counts, statistics=loss_fn.count([data]))
    valid = data["sample_mask"].bool()
    centred = data["rewards"] - data["rewards"][valid].mean()
    scores = logits.log_softmax(-1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    mask = data["token_mask"][:, 1:] * valid[:, None]
    torch.testing.assert_close(loss, -(centred[:, None] * scores * mask).sum() / mask.sum())
    with pytest.raises(ValueError, match=r"needs statistics= of the whole step, its count\(\.\.\.\)"):
        loss_fn(logits, data, *counts)


def test_counted_and_collected_join_once() -> None:
    a, b = Statistics({"a": torch.tensor(1)}), Statistics({"b": torch.tensor(2)}, {"x": torch.ones(2)})
    assert dict(a | b) == {"a": 1, "b": 2} and (a | b).samples["x"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"\['a'\] stand in both statistics; join micro-batches with \+"):
        a | Statistics({"a": torch.tensor(1)})


def test_a_statistic_of_one_kind_does_not_stand_for_another() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        Statistics({}, {}, {"ids": torch.ones(1)}) + Statistics({}, {"ids": torch.ones(1)})


def forwards(rank: int, config: dict[str, Any]) -> int:
    """How often Megatron runs a micro-batch's forward in one step."""
    import parallel_rl.megatron as M
    from tests.distributed import megatron_cases
    from tests.distributed.megatron_cases import Case, make_data, make_model

    M.initialize()
    model, runs = M.wrap_model(make_model(Case())), []
    data = make_data("ragged")
    data["rewards"] = torch.ones(len(data["sample_mask"]), dtype=torch.float64)
    loss_fn = get_loss("policy")(config, vocab_size=megatron_cases.VOCAB)
    M.forward_backward(model, loss_fn, [data, data], before_forward=lambda: runs.append(1), groups=ParallelGroups())
    M.destroy()
    return len(runs)


def test_megatron_runs_each_micro_batch_once_for_a_loss_that_counts_only() -> None:
    pytest.importorskip("megatron.core")
    assert run_world(1, forwards, {"positive_nll_weight": 0.1, "rejection": KEPT}, timeout=120) == [2]
    assert run_world(1, forwards, {"entropy_filter": 0.5}, timeout=120) == [4]
