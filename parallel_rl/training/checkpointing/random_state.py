"""Random states of this process: Python, numpy, torch on host and device, Megatron."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def begin_random_state(seed: int, data_rank: int) -> None:
    """Seed Python, numpy and, with a GPU, the host's torch generator, for reward functions."""
    rank_seed = random.Random(f"{seed} {data_rank}").getrandbits(32)
    random.seed(rank_seed)
    np.random.seed(rank_seed)
    if torch.cuda.is_available():
        torch.default_generator.manual_seed(rank_seed)


def random_state() -> Mapping[str, object]:
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (
            str(kind),
            torch.from_numpy(np.array(keys, dtype=np.int64)),
            int(place),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": {name: state.cpu() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def restore_random_state(state: Mapping[str, object]) -> None:
    """Restore a state of `random_state`, on a machine of the same kind."""
    python, numpy, host, device, megatron = (state[name] for name in ("python", "numpy", "torch", "cuda", "megatron"))
    assert isinstance(python, tuple) and isinstance(numpy, tuple) and isinstance(megatron, dict)
    assert isinstance(host, torch.Tensor)
    random.setstate(python)
    np.random.set_state((numpy[0], numpy[1].numpy().astype(np.uint32), *numpy[2:]))
    torch.set_rng_state(host)
    if isinstance(device, torch.Tensor) and torch.cuda.is_available():
        torch.cuda.set_rng_state(device)
    get_cuda_rng_tracker().set_states(megatron)
