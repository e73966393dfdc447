"""An objective reads what it declares, and nothing else; so does a loss with a reader of its own."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parallel_rl import ComponentsLossFn, NLLLoss, TokenBatch, register_loss, register_objective
from parallel_rl.losses.core.call import LossCall
from parallel_rl.losses.core.loss import Reader
from parallel_rl.losses.value import ScalarReader
from tests.losses.test_registry import make, run


@pytest.mark.parametrize(
    ("name", "reads", "says"),
    [
        ("entropy", lambda batch: batch.entropy, "needs_entropy=True of register_objective"),
        (
            "field",
            lambda batch: batch["prev_logprobs"],
            "'prev_logprobs', which it does not declare (declared: advantages, row_weight)",
        ),
        (
            "typo",
            lambda batch: batch["advantage"],
            "'advantage', which it does not declare (declared: advantages, row_weight)",
        ),
        ("recorded", lambda batch: batch.recorded("values"), "add it to token_fields [B, S] or sequence_fields [B]"),
        ("row", lambda batch: batch.expand(batch.per_sequence("rewards")), "'rewards', which it does not declare"),
        (
            "per_row",
            lambda batch: batch["row_weight"],
            "'row_weight' has one value per sequence, [B]; read it by batch.per_seq",
        ),
        (
            "per_token",
            lambda batch: batch.expand(batch.per_sequence("advantages")),
            "values per token, [B, S]; read it by b",
        ),
        ("sample_mask", lambda batch: batch["sample_mask"], "batch.per_sequence('sample_mask')"),
        (
            "statistics",
            lambda batch: batch.statistics["sum"],
            "declares none; declare count= (from the data alone) or collect=",
        ),
        ("turn", lambda batch: batch.turn_sum(batch.logprobs), "'segment_ids', which it does not declare"),
    ],
)
def test_what_is_read_is_declared(name: str, reads: Callable[[TokenBatch], Tensor], says: str) -> None:
    """The data may have it all the same, so `verify` would pass what a trainer, who asks the requirements, does not make."""

    @register_objective(f"doc_undeclared_{name}", token_fields=("advantages",), sequence_fields=("row_weight",))
    def undeclared(logprobs: Tensor, batch: TokenBatch) -> Tensor:
        return -reads(batch) * batch["token_mask"]

    logits, data = make()
    data["row_weight"] = data["rewards"]
    with pytest.raises(ValueError, match=re.escape(says)):
        run(undeclared(), logits, data)


class Undeclared(NLLLoss):
    """Reads one number per position and requires log-probs."""

    @property
    def reader(self) -> Reader:
        return ScalarReader(self)


def test_a_reader_of_something_else_is_declared() -> None:
    """A host's log-probs were taken by a loss that reads something else; as a component its reader was never called."""
    logits, data = make()
    rows = {"data": {"response_mask": torch.ones(1, 2)}, "global_valid_seqs": 1, "global_valid_toks": 2}
    says = "Undeclared has a ScalarReader and requires reads = 'log-probs'; declare reads='logits'"
    with pytest.raises(ValueError, match=says):
        run(Undeclared(), logits, data)
    with pytest.raises(ValueError, match=says):
        Undeclared().from_logprobs(-torch.ones(1, 2), **rows)
    register_loss("doc_undeclared_reader")(Undeclared)
    with pytest.raises(ValueError, match=says):
        ComponentsLossFn({"components": {"one": {"loss": {"name": "doc_undeclared_reader"}}}}).count(data)


def test_an_output_of_no_known_kind_is_named() -> None:
    call = LossCall("logits", make()[1], torch.tensor(1), torch.tensor(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="output must be logits, an LMHeadInput or log-probs, got str"):
        NLLLoss().run(call)
