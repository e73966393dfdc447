"""A Megatron model as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from parallel_rl.agreement import gather_results, on_first_rank, raise_on_all_ranks
from parallel_rl.config.hf_config import CONFIG
from parallel_rl.megatron.hf.export import Held, Models, describe_model, held_parameters, split
from parallel_rl.megatron.hf.folder import INDEX, SINGLE, Source, check_names, read_folder, require_safetensors
from parallel_rl.megatron.model import gather_parameters, unwrap
from parallel_rl.megatron.weights import whole_tensor

#: files of a tokenizer and an engine
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
MAX_FILE_BYTES = 5 * 10**9


def save_hf(
    model: Models,
    out: str | Path,
    *,
    companions: str | Path | None = None,
    entries: Mapping[str, object] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a model as config.json and safetensors, for `load_hf`, transformers and vLLM.

    Every rank of the world calls it; each pipeline stage and expert rank writes its own files. The folder gets its name only
    when it is complete.

    Args:
        model: a model, wrapped or not, or the chunks of this rank.
        out: a new or empty folder on a file system that all ranks share.
        companions: a folder whose tokenizer files and generation_config.json are copied.
        entries: more entries of config.json, such as eos_token_id; those of the model's source folder are kept.
        max_file_bytes: per file; a writing rank holds as much on the host.

    Raises:
        ValueError: on all ranks: `out` is not empty; a model of no Hugging Face family.
        RuntimeError: on all ranks: a file could not be written; nothing stays.
    """
    out = Path(out)
    raise_on_all_ranks(require_safetensors)
    held, sources = raise_on_all_ranks(partial(held_parameters, model))
    gather_parameters(model)
    partial_folder = on_first_rank(partial(_begin, out), f"{out} cannot be written")
    try:
        files = _share_out(_written_here(held), sources, max_file_bytes)
        files_here = files[dist.get_rank()]
        error = _write(partial_folder, held, sources, files_here)
        raise_on_all_ranks(partial(_raise, error), what=f"{out} could not be written")
        chunk = unwrap(model if isinstance(model, torch.nn.Module) else model[0])
        config = {**(entries or {}), **_config(chunk)}
        end = partial(
            _finish, partial_folder, out, [part for rank in files for part in rank], sources, config, companions
        )
        on_first_rank(end, f"{out} could not be finished")
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(partial_folder, ignore_errors=True)
        raise


@dataclass(frozen=True)
class _File:
    name: str
    parameters: tuple[str, ...]


def _begin(out: Path) -> Path:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists already and is not overwritten; choose a new folder")
    partial_folder = out.parent / f".{out.name}.{os.getpid()}.partial"
    partial_folder.mkdir(parents=True)
    return partial_folder


def _written_here(held: Sequence[Held]) -> list[Held]:
    """List the parameters that this rank writes, one of the ranks that hold them."""
    dense = parallel_state.get_tensor_model_parallel_rank() == 0
    dense &= parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    expert = parallel_state.get_expert_tensor_parallel_rank() == parallel_state.get_expert_data_parallel_rank() == 0
    return [entry for entry in held if (expert if entry.experts else dense)]


def _share_out(held: Sequence[Held], sources: Mapping[str, Source], limit: int) -> list[list[_File]]:
    """Plan the files of every rank, numbered over the whole model."""
    names_of_rank: list[list[str]] = []
    size = limit
    for entry in held:
        width = sum(torch.Size(shape).numel() for shape in sources[entry.name].shapes().values())
        width *= entry.parameter.element_size()
        if size + width > limit:
            names_of_rank.append([])
            size = 0
        names_of_rank[-1].append(entry.name)
        size += width
    of_ranks = gather_results(lambda: names_of_rank)
    count, number = sum(map(len, of_ranks)), 0
    files: list[list[_File]] = []
    for parts in of_ranks:
        files.append([])
        for names in parts:
            number += 1
            name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            files[-1].append(_File(name, tuple(names)))
    return files


def _write(
    folder: Path, held: Sequence[Held], sources: Mapping[str, Source], files: Sequence[_File]
) -> Exception | None:
    """Gather this stage's parameters and write `files`; return a failure, as other ranks still gather."""
    ends = {file.parameters[-1]: file for file in files}
    names_here = {name for file in files for name in file.parameters}
    pending: dict[str, Tensor] = {}
    error: Exception | None = None
    for entry in held:
        tensor_of_entry = whole_tensor(entry.parameter)
        if error is not None or entry.name not in names_here:
            continue
        try:
            for name, tensor in split(sources[entry.name], tensor_of_entry).items():
                pending[name] = tensor.to("cpu", copy=True).contiguous()
            if entry.name in ends:
                _write_file(folder / ends[entry.name].name, pending)
                pending = {}
        except Exception as failure:
            error = failure
    return error


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _config(chunk: GPTModel) -> dict[str, object]:
    """Return config.json's entries: of the folder that the model was loaded from, else our own."""
    described, scalar_head = describe_model(chunk), bool(chunk.scalar_head)
    written = described.architecture.to_config(scalar_head=scalar_head)
    config = {**described.config, "architectures": written["architectures"]}
    if scalar_head:
        config |= {name: written[name] for name in ("id2label", "label2id")}
    dtype = str(chunk.config.params_dtype).removeprefix("torch.")
    name = "dtype" if "dtype" in config else "torch_dtype"  # versions of transformers prefer different names
    return {**{key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}, name: dtype}


def _finish(
    folder: Path,
    out: Path,
    files: Sequence[_File],
    sources: Mapping[str, Source],
    config: Mapping[str, object],
    companions: str | Path | None,
) -> None:
    placed = {part: file.name for file in files for name in file.parameters for part in sources[name].shapes()}
    if len(files) > 1:
        size = sum((folder / file.name).stat().st_size for file in files)
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": placed})
    check_names(
        read_folder(folder), {name: shape for source in sources.values() for name, shape in source.shapes().items()}
    )
    _write_json(folder / CONFIG, config)
    for name in COMPANIONS if companions is not None else ():
        if (Path(companions or "") / name).is_file():
            shutil.copyfile(Path(companions or "") / name, folder / name)
    folder.rename(out)


def _write_json(path: Path, tree: Mapping[str, object]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(tree, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
