"""The data of one of several losses on a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from parallel_rl.losses.core.requirements import Field

if TYPE_CHECKING:
    from torch import Tensor

_NOT = "not "
#: [B, S] bool, whether there is a token, in rows that were padded here; not a user's field
IN_ROW = "in_row"


@dataclass(frozen=True)
class DataView:
    """A component's view of the data.

    >>> import torch
    >>> data = {"token_mask": torch.ones(1, 2), "sample_mask": torch.ones(1), "seen": torch.tensor([[True, False]])}
    >>> DataView(mask="not seen").of(data)["token_mask"].tolist()
    [[False, True]]

    Attributes:
        mask: name of a field [B, S] used as token_mask, or "not NAME" for its complement; None: token_mask.
        rows: name of a field [B] that selects rows, or "not NAME" for its complement; None: all rows.
        fields: name of a field of the loss → name of the data's field to read instead.
    """

    mask: str | None = None
    rows: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def masks(self) -> tuple[Field, ...]:
        named = (self.mask, "token"), (self.rows, "sequence")
        return tuple(Field(name.removeprefix(_NOT), per, "mask") for name, per in named if name is not None)  # type: ignore[arg-type]

    def named(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        return tuple(replace(field, name=self.fields.get(field.name, field.name)) for field in fields)

    def of(self, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the data under the loss's names, with the component's masks."""
        # a renamed field must not fall back to the data's field of the loss's name
        view = {name: x for name, x in data.items() if name not in self.fields}
        view |= {target: data[name] for target, name in self.fields.items() if name in data}
        if self.mask is not None:
            chosen = _chosen(data, self.mask)
            view["token_mask"] = chosen & data[IN_ROW] if IN_ROW in data else chosen
        if self.rows is not None:
            view["sample_mask"] = data["sample_mask"].bool() & _chosen(data, self.rows)
        return view


def _chosen(data: Mapping[str, Tensor], name: str) -> Tensor:
    chosen = data[name.removeprefix(_NOT)].bool()
    return ~chosen if name.startswith(_NOT) else chosen
