"""Hugging Face checkpoints in and out of megatron-core, on the layout that `initialize` has set (extra `[hf]`).

- `load_hf(folder)` gives this rank's model; `save_hf(model, out)` writes a folder
- `export_tensors(model)` iterates over whole tensors for an inference engine
- `read_hf`, `build_hf`: config.json alone, and a model that waits for its weights
"""

from parallel_rl.megatron.hf.describe import describe_model
from parallel_rl.megatron.hf.export import export_tensors
from parallel_rl.megatron.hf.load import HFModel, build_hf, load_hf, read_hf
from parallel_rl.megatron.hf.save import save_hf

__all__ = ["load_hf", "save_hf", "export_tensors", "read_hf", "build_hf", "describe_model", "HFModel"]
