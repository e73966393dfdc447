"""Random inputs in the shape of the origins' calls."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, WIDTH = 6, 8


def responses(seed: int, dtype: torch.dtype = torch.float64, *, poison: bool = True) -> dict[str, Tensor]:
    """[6, 8] log-probs and the like, masks with holes, row 3 empty; what is masked is NaN or inf where `poison`."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, WIDTH, generator=g, dtype=dtype)

    logprob = -3 * torch.rand(ROWS, WIDTH, generator=g, dtype=dtype)
    mask = torch.rand(ROWS, WIDTH, generator=g) < 0.7
    mask[3], mask[0, :2] = False, True
    data = {
        "logprob": logprob,
        "old_logprob": logprob + normal(0.4),
        "ref_logprob": logprob + normal(0.4),
        "rollout": logprob + normal(0.5),
        "values": normal(1.0),
        "old_values": normal(1.0),
        "returns": normal(1.0),
        "advantages": normal(1.0),
    }
    data["advantages"][4] = data["advantages"][4, 0]
    data["advantages"][5, 0] = 0.0
    if poison:
        bad = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)[torch.arange(ROWS * WIDTH) % 3]
        data = {key: torch.where(mask, value, bad.view(ROWS, WIDTH)) for key, value in data.items()}
    data["action_mask"] = mask
    data["expert_mask"] = torch.tensor([False, True, False, False, True, False])
    data["step"] = torch.full((ROWS,), 13)
    return data
