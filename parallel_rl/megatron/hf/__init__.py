"""Hugging Face checkpoints in and out of megatron-core, on the layout of `initialize` (extra `[hf]`).

- `load_hf(folder)` returns this rank's model; `save_hf(model, out)` writes a folder
- `export_tensors(model)` iterates over whole tensors for an inference engine
- `fill_hf` loads into an existing model, `build_hf` builds one without weights, `read_hf` reads config.json only
"""

from parallel_rl.config.hf_config import HFModel, read_hf
from parallel_rl.megatron.hf.export import describe_model, export_tensors
from parallel_rl.megatron.hf.load import build_hf, check_hf, fill_hf, load_hf
from parallel_rl.megatron.hf.save import save_hf

__all__ = [
    "load_hf",
    "save_hf",
    "export_tensors",
    "fill_hf",
    "build_hf",
    "check_hf",
    "read_hf",
    "describe_model",
    "HFModel",
]
