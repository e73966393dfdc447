"""The optimal token baseline against loops over groups, answers and places, in plain Python floats."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from parallel_rl.advantages import estimate

N, S = 9, 7


def make(seed: int = 0) -> dict[str, Tensor]:
    """A group of four, one of three with an answer dropped, a pair, one of them empty: holes, and prompts before them."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(N, S, generator=g) < 0.75
    mask[:, 0] = False  # the prompt, of one or two tokens
    mask[::2, 1] = False
    mask[0, 5:], mask[8] = False, False
    return {
        "rewards": torch.randn(N, generator=g, dtype=torch.float64),
        "group_ids": torch.tensor([3, 3, 3, 3, 5, 5, 5, 8, 8]),
        "token_mask": mask,
        "sample_mask": torch.arange(N) != 5,
        "prev_logprobs": -torch.rand(N, S, generator=g, dtype=torch.float64) * 3,
        "generation_logprobs": -torch.rand(N, S, generator=g, dtype=torch.float64) * 3,
        "sum_pi_squared": torch.rand(N, S, generator=g, dtype=torch.float64),
        "kl": torch.rand(N, S, generator=g, dtype=torch.float64),
    }


def truth(
    data: dict[str, Tensor], turns: bool, tail: bool, cap: float | None, kl: float, eps: float
) -> list[list[float]]:
    """[N][S] advantages; `turns` counts an answer's own tokens, else its columns."""
    returns: dict[int, dict[int, float]] = {}
    weights: dict[int, dict[int, float]] = {}
    columns: dict[int, dict[int, int]] = {}
    groups = defaultdict(list)
    for i in range(N):
        valid = [t for t in range(S) if data["token_mask"][i, t]]
        if not data["sample_mask"][i] or (turns and not valid):
            continue
        groups[int(data["group_ids"][i])].append(i)
        of = {t: (at if turns else t - valid[0]) for at, t in enumerate(valid)}
        columns[i], returns[i], weights[i] = of, {}, {}
        path = 0.0
        for t in valid:
            pi = math.exp(data["prev_logprobs"][i, t])
            step = 1 - 2 * pi + float(data["sum_pi_squared"][i, t])
            if cap is not None:
                step *= min(math.exp(data["prev_logprobs"][i, t] - data["generation_logprobs"][i, t]), cap) ** 2
            path += step
            weights[i][of[t]] = path
            returns[i][of[t]] = float(data["rewards"][i]) - kl * sum(float(data["kl"][i, s]) for s in valid if s >= t)
    found = [[0.0] * S for _ in range(N)]
    for members in groups.values():
        lengths = sorted(len(columns[i]) for i in members)
        for i in members:
            for t, place in columns[i].items():
                baseline = 0.0
                if len(members) > 1:
                    others = [j for j in members if place in returns[j]]
                    total = sum(weights[j][place] for j in others) + eps
                    baseline = sum(returns[j][place] * weights[j][place] for j in others) / total
                    longest = len(columns[i]) == lengths[-1] > lengths[-2]
                    if tail and longest and place >= lengths[-2]:
                        baseline = 0.0
                found[i][t] = returns[i][place] - baseline
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(("cap", "kl", "eps"), [(None, 0.0, 1e-8), (1.5, 0.2, 0.1)])
def test_against_loops(turns: bool, tail: bool, cap: float | None, kl: float, eps: float, seed: int) -> None:
    data = make(seed)
    config = {"name": "tir_optimal_token_baseline" if turns else "optimal_token_baseline", "handle_zero_tail": tail}
    config |= {"importance_cap": cap, "kl_coefficient": kl, "eps": eps}
    want = torch.tensor(truth(data, turns, tail, cap, kl, eps), dtype=torch.float64)
    dirty = {name: x.clone() for name, x in data.items()}
    for name in ("prev_logprobs", "generation_logprobs", "sum_pi_squared", "kl"):
        dirty[name][~(data["token_mask"] & data["sample_mask"][:, None])] = torch.nan
    torch.testing.assert_close(estimate(config, dirty).advantages, want, rtol=1e-12, atol=1e-12)


def test_the_two_differ_where_tools_speak_and_in_their_tails() -> None:
    """A hole moves a column, not a token; by default only the form for turns leaves the longest's tail without a baseline."""
    data = make()
    one, other = (estimate(f"{name}optimal_token_baseline", data).advantages for name in ("", "tir_"))
    assert not torch.allclose(one, other)
    data["token_mask"] = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0]]).repeat(5, 1)[:N]
    data["group_ids"] = torch.arange(N) // 2
    plain, tail = (estimate(f"{name}optimal_token_baseline", data).advantages for name in ("", "tir_"))
    assert torch.equal(plain[:2, :4], tail[:2, :4])
    assert plain[0, 4:].abs().max() < 1e-6 and torch.equal(tail[0, 4:], data["rewards"][0].expand(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"importance_cap": 0.0}, "importance_cap = 0.0 must be above 0"),
        ({"eps": -1.0}, "eps = -1.0 must be at least 0"),
    ],
)
def test_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate({"name": "optimal_token_baseline", **change}, make())
    with pytest.raises(ValueError, match="need the field sum_pi_squared"):
        estimate("optimal_token_baseline", {name: x for name, x in make().items() if name != "sum_pi_squared"})
    with pytest.raises(ValueError, match="need the field generation_logprobs"):
        data = {name: x for name, x in make().items() if name != "generation_logprobs"}
        estimate({"name": "optimal_token_baseline", "importance_cap": 2.0}, data)
