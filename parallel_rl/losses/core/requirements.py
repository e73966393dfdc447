"""Everything that a loss needs of its caller, in one value that an instance builds from its config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parallel_rl.counts import Aggregation, WeightedBy
    from parallel_rl.vocab.truncation import Truncation

Alignment = Literal["token", "predictor"]
Reads = Literal["logits", "rows", "log-probs", "scalar"]


@dataclass(frozen=True)
class Field:
    """One field of a loss's data.

    >>> Field("rewards", per="sequence")
    Field(name='rewards', per='sequence', dtype='float', alignment='token', width=False)

    Attributes:
        name: key of the data.
        per: "token" [B, S], whole on every context rank; "sequence" [B]; "local" in the order of the logits, on this rank only,
            with the logits' two leading dimensions.
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
    """Inputs that a loss reads and properties that it claims.

    >>> Requirements((Field("advantages"),), token_separable=True).names
    ('advantages',)

    Attributes:
        fields: of the data, beside input_ids, token_mask and sample_mask.
        optional: further fields, which metrics alone read: checked where they are given, and the metrics left out where not.
        reads: "log-probs" (and entropy) or "rows" of logits, each by itself, for which an `LMHeadInput` makes no whole logits;
            "logits"; or "scalar", one output a position or a row in place of logits.
        paired: rows come as (even, odd) pairs.
        counted: the call takes `statistics=` of the whole step, among them those that the data alone gives, see `count`.
        collected: the call takes `statistics=`, among them those of the model's output, see `collect`.
        entropy: the entropy of the policy is computed.
        entropy_measured: metrics alone read it, so that a call on log-probs may leave it out.
        entropy_gradient: where the loss reads it, its gradient goes through it: a call on log-probs must give it with one.
        untruncated: log-probs of the whole distribution are read beside those of a truncated policy.
        truncatable: the log-probs may be those of a truncated policy (top_k, top_p, kept_sets).
        token_separable: a sum over tokens of terms that depend on the log-prob and entropy of their own token alone, all else
            (data, statistics, counts) being constant, so that gradients may be computed in forward (`LMHeadInput`).
        weighs_sequences: a token's term depends on which other tokens are valid (n_i, sums of data over a sequence). A
            truncated policy drops tokens by their log-probs, so that such a loss then does not separate over tokens.
        token_weights: how the loss is divided where it multiplies its tokens by the field token_weights, see the module of that
            name; None: it reads none.
        units: the aggregation by turns, prompts or trajectories whose units `count` counts; None: none are counted.
        ordered: a token's place among those of its sequence matters.
        shift: position t speaks of token t + 1, which it predicts; False: of token t itself.
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
        """Whether the call takes `statistics=` of the whole step."""
        return self.counted or self.collected

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields."""
        return tuple(field.name for field in self.fields)

    def separates(self, truncation: Truncation) -> bool:
        """Whether the loss on the policy truncated so is a sum over tokens."""
        return self.token_separable and not (self.weighs_sequences and truncation)

    def field(self, name: str) -> Field:
        """The field of this name; one that is not declared is a token-aligned float."""
        return next((field for field in self.fields if field.name == name), Field(name))

    def plain_names(self) -> tuple[str, ...]:
        """Names of the token-aligned float fields [B, S], which one look-up takes together."""
        return tuple(field.name for field in self.fields if field == Field(field.name))

    def given(self, data: Mapping[str, object]) -> Requirements:
        """Require the optional fields that `data` has, and no others; `optional` then says which these are."""
        there = tuple(field for field in self.optional if field.name in data)
        return replace(self, fields=(*self.fields, *there), optional=there)

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the fields that the data must have."""
        optional = {field.name for field in self.optional}
        return tuple(name for name in self.names if name not in optional)

    @property
    def reads_places(self) -> bool:
        """Whether it matters where in its sequence a token lies: for turns, draws by position, or by its own word."""
        elsewhere = any(field.alignment == "predictor" for field in self.fields)
        return self.ordered or elsewhere or not {"segment_ids", "sample_ids"}.isdisjoint(self.names)

    def on_rows(self) -> Requirements:
        """The requirements of the same loss on rows of log-probs, of which every column speaks of its own token.

        >>> Requirements((Field("x", alignment="predictor"),)).on_rows().shift
        False
        """
        fields = tuple(replace(field, alignment="token") for field in self.fields)
        return replace(self, fields=fields, shift=False)

    def with_temperature(self) -> Requirements:
        """Require `temperature` [B] too, that each sample was drawn at."""
        return replace(self, fields=(*self.fields, Field("temperature", per="sequence")))

    def with_kept_ids(self) -> Requirements:
        """Require `kept_ids` [B, S, K] too, the sampler's kept token ids."""
        return replace(self, fields=(*self.fields, Field("kept_ids", dtype="integer", width=True)))
