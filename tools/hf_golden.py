"""Make tests/megatron/hf/data: tiny random models of each Hugging Face family, and transformers' logits of them.

    python -m tools.hf_golden        # where torch, safetensors and transformers are installed; once with 4.57, once with 5

Weights are drawn from their names, so that only config.json, the names and shapes that transformers writes, and the logits are
stored. A run checks what the other version of transformers wrote: names and logits must agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

DATA = Path(__file__).parents[1] / "tests/megatron/hf/data"
ROWS, LENGTH = 2, 32
_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 61,  # padded on every layout with tensor ranks
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True, "head_dim": 32,
    "rope_theta": 1e6,
}  # fmt: skip
#: name of a case: model_type and what differs from the sizes
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"rms_norm_eps": 1e-5, "num_hidden_layers": 4}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama31": (
        "llama",
        {
            "max_position_embeddings": 131072,
            "rope_theta": 5e5,
            "rope_scaling": {**_LLAMA31, "original_max_position_embeddings": 8192},
        },
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32, "rope_theta": 1e6}),
    "qwen2": ("qwen2", {"rope_theta": 1e6}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32, "rope_theta": 1e6}),
    "qwen3_tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", _MOE),
    "qwen3_moe_raw": ("qwen3_moe", {**_MOE, "norm_topk_prob": False}),
}


def draw(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Draw weights from their names: norms about 1, biases and matrices such that logits are about 0.6."""
    found = {}
    for name, shape in shapes.items():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
        values = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed))
        found[name] = 1 + 0.2 * values if "norm" in name else 0.08 * values
    return found


def tokens() -> Tensor:
    """The input: [ROWS, LENGTH] tokens of a vocabulary of 61."""
    return torch.arange(ROWS * LENGTH).mul(7919).remainder(61).view(ROWS, LENGTH)


def _model(name: str) -> torch.nn.Module:
    import transformers

    family, options = CASES[name]
    options = {**_SIZES, **options}
    if int(transformers.__version__.split(".")[0]) >= 5:
        theta = options.pop("rope_theta", 10000.0)
        scaling = options.pop("rope_scaling", {"rope_type": "default"})
        options["rope_parameters"] = {"rope_theta": theta, **scaling}  # type: ignore[dict-item]
    config = transformers.AutoConfig.for_model(family, **options)
    config.architectures = None
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.float().eval()


def _tensors(model: torch.nn.Module, folder: Path) -> dict[str, list[int]]:
    """The names and shapes that transformers writes: version 5 keeps experts stacked in memory and writes them apart."""
    from safetensors import safe_open

    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}


def main() -> None:
    import tempfile

    import transformers
    from safetensors.torch import load_file, save_file

    version = transformers.__version__.split(".")[0]
    DATA.mkdir(parents=True, exist_ok=True)
    index = json.loads((DATA / "golden.json").read_text()) if (DATA / "golden.json").exists() else {}
    logits = load_file(DATA / "logits.safetensors") if (DATA / "logits.safetensors").exists() else {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            model = _model(name)
            shapes = _tensors(model, path)
            save_file(draw(shapes), path / "model.safetensors", metadata={"format": "pt"})
            loaded = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").float().eval()  # nosec B615
            with torch.no_grad():
                found = loaded(tokens()).logits
            config = json.loads((path / "config.json").read_text())
        config.pop("transformers_version", None)
        case = index.setdefault(name, {"shapes": shapes, "config": {}})
        case["config"][version] = config
        assert case["shapes"] == shapes, (name, "the versions write other tensors")
        apart = 0.0 if name not in logits else float((logits[name] - found).abs().max())
        assert apart < 2e-6, (name, apart)
        logits.setdefault(name, found.contiguous())
        print(f"{name}: {len(shapes)} tensors, |logits| {float(found.abs().mean()):.2f}, versions apart {apart:.1e}")
    (DATA / "golden.json").write_text(json.dumps(index, sort_keys=True, separators=(",", ":")) + "\n")
    save_file(logits, DATA / "logits.safetensors")


if __name__ == "__main__":
    main()
