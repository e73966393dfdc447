"""Interface of a loss to a trainer, beside its call: what must be refused, and a state that changes over the steps."""

from __future__ import annotations

from collections.abc import Mapping


class TrainedLoss:
    """Base of the losses, for a trainer that is blind to which one it runs."""

    @property
    def on_policy(self) -> bool:
        """Whether it is right only for the policy that drew the samples, so that a second update on them is refused."""
        return False

    @property
    def kl_in_reward(self) -> bool:
        """Whether it leaves the KL to the reference out because the advantages hold it already."""
        return False

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Move on by one optimizer step; the trainer calls it after each. A loss with a schedule overrides it.

        Args:
            metrics: of the step, reduced: equal on all ranks, so that what follows from them is too.
        """

    def state_dict(self) -> dict[str, float]:
        """The numbers that change over the steps, for a checkpoint; equal on all ranks, empty without a state.

        A loss with a state names it from its start on: a resumed run looks for what its new loss has.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from where `state_dict` was taken.

        Raises:
            ValueError: a state that this loss does not have.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state, got {dict(state)}")
