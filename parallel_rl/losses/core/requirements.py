"""Requirements of a loss on its caller, derived from its config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parallel_rl.counts import Aggregation, WeightedBy
    from parallel_rl.vocab.shards import Truncation

Alignment = Literal["token", "predictor"]
Reads = Literal["logits", "rows", "log-probs", "scalar"]


@dataclass(frozen=True)
class Field:
    """One field of a loss's data.

    >>> Field("rewards", per="sequence")
    Field(name='rewards', per='sequence', dtype='float', alignment='token', width=False)

    Attributes:
        name: key of the data.
        per: "token" [B, S], whole on every context rank; "sequence" [B]; "local" in the order of the logits, on this rank
            only, with their two leading dimensions.
        dtype: "float"; "integer" for integers and bools; "mask" for 0 and 1 of any of these; "label" for floats and bools.
        alignment: column t describes token t ("token"), or token t + 1, which is predicted there ("predictor").
        width: several values a token, [B, S, K].
    """

    name: str
    per: Literal["token", "sequence", "local"] = "token"
    dtype: Literal["float", "integer", "mask", "label"] = "float"
    alignment: Alignment = "token"
    width: bool = False


WEIGHTS = Field("token_weights")


@dataclass(frozen=True)
class Requirements:
    """Inputs that a loss reads, and its properties.

    >>> Requirements((Field("advantages"),), token_separable=True).names
    ('advantages',)

    Attributes:
        fields: of the data, in addition to input_ids, token_mask and sample_mask.
        optional: fields that only metrics read: checked if present; otherwise the metrics are left out.
        reads: "log-probs" (and entropy) or "rows" of logits, one by one, so that an `LMHeadInput` makes no whole logits;
            "logits"; or "scalar", one output a position or a row in place of logits.
        paired: rows come as (even, odd) pairs.
        counted: the call takes `statistics=` of the whole step, including those of the data alone, see `count`.
        collected: the call takes `statistics=`, including those of the model's output, see `collect`.
        entropy: the policy's entropy is computed.
        entropy_measured: only metrics read the entropy, so a call on log-probs may omit it.
        entropy_gradient: the loss's gradient goes through the entropy: a call on log-probs must pass one with gradient.
        untruncated: log-probs of the whole distribution are read as well as those of a truncated policy.
        truncatable: the log-probs may be of a truncated policy (top_k, top_p, kept_sets).
        token_separable: the loss is a sum of terms that depend on the log-prob and entropy of their own token only, with
            data, statistics and counts constant, so gradients may be computed in forward (`LMHeadInput`).
        weighs_sequences: a token's term depends on which other tokens are valid (n_i, sums of data over a sequence). With a
            truncated policy, which drops tokens by their log-probs, the loss then does not separate over tokens.
        token_weights: how the loss is divided if it multiplies its tokens by the field token_weights, see
            `losses.core.aggregation`; None: it reads none.
        units: the aggregation by turns, prompts or trajectories whose units `count` counts; None: none.
        ordered: a token's place in its sequence matters.
        shift: position t holds token t + 1, which it predicts; False: token t.
    """

    fields: tuple[Field, ...] = ()
    optional: tuple[Field, ...] = ()
    reads: Reads = "log-probs"
    paired: bool = False
    counted: bool = False
    collected: bool = False
    entropy: bool = False
    entropy_measured: bool = False
    entropy_gradient: bool = True
    untruncated: bool = False
    truncatable: bool = False
    token_separable: bool = False
    weighs_sequences: bool = True
    token_weights: WeightedBy | None = None
    units: Aggregation | None = None
    ordered: bool = False
    shift: bool = True

    @property
    def statistics(self) -> bool:
        return self.counted or self.collected

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    def separates(self, truncation: Truncation) -> bool:
        """Return whether the loss on the truncated policy is a sum of terms of single tokens."""
        return self.token_separable and not (self.weighs_sequences and truncation)

    def field(self, name: str) -> Field:
        """Return the field of this name; by default a token-aligned float."""
        return next((field for field in self.fields if field.name == name), Field(name))

    def plain_names(self) -> tuple[str, ...]:
        """Return the names of the token-aligned float fields [B, S], which are looked up together."""
        return tuple(field.name for field in self.fields if field == Field(field.name))

    def given(self, data: Mapping[str, object]) -> Requirements:
        """Require the optional fields that `data` has; `optional` then lists these."""
        present = tuple(field for field in self.optional if field.name in data)
        return replace(self, fields=(*self.fields, *present), optional=present)

    @property
    def asked(self) -> tuple[str, ...]:
        optional = {field.name for field in self.optional}
        return tuple(name for name in self.names if name not in optional)

    @property
    def reads_places(self) -> bool:
        """Return whether a token's place in its sequence matters: for turns, draws by position, or declared."""
        elsewhere = any(field.alignment == "predictor" for field in self.fields)
        return self.ordered or elsewhere or not {"segment_ids", "sample_ids"}.isdisjoint(self.names)

    def on_rows(self) -> Requirements:
        """Return the requirements on rows of log-probs, where column t scores token t."""
        fields = tuple(replace(field, alignment="token") for field in self.fields)
        return replace(self, fields=fields, shift=False)

    def with_temperature(self) -> Requirements:
        return replace(self, fields=(*self.fields, Field("temperature", per="sequence")))

    def with_kept_ids(self) -> Requirements:
        return replace(self, fields=(*self.fields, Field("kept_ids", dtype="integer", width=True)))
