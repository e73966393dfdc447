"""A Hugging Face folder as Megatron models of the current layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch.nn import Parameter

from parallel_rl.agreement import communication_device, on_first_rank, raise_on_all_ranks
from parallel_rl.config.hf_config import HFModel, read_hf
from parallel_rl.groups import max_over_ranks
from parallel_rl.megatron.hf.folder import Folder, Reader, Source, check_names, read_folder, table
from parallel_rl.megatron.model import build_model, unwrap
from parallel_rl.megatron.model_config import build_config
from parallel_rl.megatron.weights import EMBEDDING, cut_of, global_parameters, spelled_locally

_TIED_HEAD, _SCORE = "lm_head.weight", "score.weight"
_IGNORED = (".rotary_emb.inv_freq",)  # computed values in old checkpoints


def load_hf(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    scalar_head: bool = False,
    vocab_multiple: int = 1,
    overrides: Mapping[str, object] | None = None,
    prefix_trees: bool = False,
) -> list[GPTModel]:
    """Load config.json and safetensors into this rank's part of a model: a list of its model chunks.

    Every rank of the world calls it and reads only its own rows. Families: llama (with 3.1's rotary positions), mistral, qwen2,
    qwen3, qwen3_moe.

    Args:
        folder: as transformers writes it. Links are followed, pickles never opened.
        dtype: of the parameters, for any dtype of the files.
        sequence_parallel: see `build_config`. vocab_multiple: see `build_model`.
        scalar_head: one output per position in place of logits: the folder's `score.weight` if there is one, else zeros.
        overrides: further fields of TransformerConfig by name (recompute_granularity, moe_aux_loss_coeff, ...).
        prefix_trees: see `build_model`.

    Raises:
        ValueError: on all ranks: no weights; an unsupported family or option of config.json; a tensor that is missing, unused
            or of another shape; a truncated file; sizes that the layout does not divide; weights that differ between nodes.
    """
    described, reader = _open(folder, scalar_head)
    models = build_hf(
        described,
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        scalar_head=scalar_head,
        vocab_multiple=vocab_multiple,
        overrides=overrides,
        prefix_trees=prefix_trees,
    )
    raise_on_all_ranks(partial(_fill, models, reader))
    _check_alike(models, folder)
    return models


def fill_hf(models: Sequence[torch.nn.Module], folder: str | Path) -> None:
    """Load a folder into this rank's part of an existing model, wrapped or not; errors as of `load_hf`."""
    bare = [unwrap(model) for model in models]
    described, reader = _open(folder, bare[0].scalar_head)
    for model in bare:
        model.hf = described
    raise_on_all_ranks(partial(_fill, bare, reader))
    _check_alike(bare, folder)


def check_hf(folder: str | Path, *, scalar_head: bool = False) -> None:
    """Check config.json and the headers of a folder's weights; ValueError if `load_hf` would refuse it."""
    _read(Path(folder), scalar_head)


def _open(folder: str | Path, scalar_head: bool) -> tuple[HFModel, Folder]:
    return on_first_rank(partial(_read, Path(folder), scalar_head), f"{folder} cannot be read")


def build_hf(
    described: HFModel,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    scalar_head: bool = False,
    vocab_multiple: int = 1,
    overrides: Mapping[str, object] | None = None,
    prefix_trees: bool = False,
) -> list[GPTModel]:
    """Build this rank's part of a model without initial weights, for a later load."""
    sizes = described.architecture
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    config = build_config(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.groups,
        ffn_hidden_size=sizes.ffn,
        kv_channels=sizes.head_dim,
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        qkv_bias=sizes.qkv_bias,
        qk_norm=sizes.qk_norm,
        experts=sizes.experts,
        norm_epsilon=sizes.norm_epsilon,
        virtual_pp=chunks,
        overrides=overrides,
    )
    models = []
    for stage in [None] if chunks is None else range(chunks):
        model = build_model(
            config,
            sizes.vocab,
            sizes.max_positions,
            rotary_base=sizes.rope_theta,
            rope_scaling=sizes.rope_scaling,
            tie_embeddings=sizes.tied and not scalar_head,
            vocab_multiple=vocab_multiple,
            scalar_head=scalar_head,
            draw_weights=False,
            prefix_trees=prefix_trees,
            vp_stage=stage,
        )
        model.hf = described
        models.append(model)
    return models


def _read(path: Path, scalar_head: bool) -> tuple[HFModel, Folder]:
    described, folder = read_hf(path), read_folder(path)
    sources = table(described.architecture, scalar_head=scalar_head)
    expected = {name: shape for source in sources.values() for name, shape in source.shapes().items()}
    ignored: tuple[str, ...] = _IGNORED
    if scalar_head:
        ignored += (_TIED_HEAD,)
        if _SCORE not in folder.shapes:
            del expected[_SCORE]
    elif described.architecture.tied:
        ignored += (_TIED_HEAD,)  # a copy of the embedding, see `_fill`
    check_names(folder, expected, ignored)
    return described, folder


@torch.no_grad()
def _fill(models: Sequence[GPTModel], folder: Folder) -> None:
    with Reader(folder.path) as reader:
        for model in models:
            sources = table(model.hf.architecture, scalar_head=model.scalar_head)
            for name, parameter in global_parameters([model]):
                source = sources.get(spelled_locally(name))
                if source is None:
                    raise ValueError(f"the model's parameter {name} has no counterpart in a Hugging Face folder")
                if source.rows[0].name not in folder.files:  # a scalar head that the folder lacks starts from zeros
                    parameter.zero_()
                    continue
                read_parameter(reader, folder, source, parameter)
                if (
                    name == EMBEDDING
                    and not model.scalar_head
                    and _TIED_HEAD in folder.files
                    and model.hf.architecture.tied
                ):
                    _check_tied(reader, folder, source, parameter)


def _check_alike(models: Sequence[GPTModel], folder: str | Path) -> None:
    """Compare weights over the ranks that hold the same ones, since each node may read another disk."""
    sums = {False: 0, True: 0}  # sums of bytes: of experts (True), of the rest
    for name, parameter in global_parameters(models):
        sums[".experts." in name] += int(parameter.detach().contiguous().view(torch.uint8).sum(dtype=torch.int64))
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    groups = {False: dense, True: parallel_state.get_expert_data_parallel_group()}
    differs = False
    for experts, group in groups.items():
        device = communication_device(group, torch.device("cpu"))
        most, least = (max_over_ranks(sign * sums[experts], group, device) for sign in (1, -1))
        differs |= most != -least

    def compare() -> None:
        if differs:
            raise ValueError(
                f"{folder} does not hold the same weights on all nodes: data ranks would train different models; choose a "
                "folder that all nodes share"
            )

    raise_on_all_ranks(compare)


def read_parameter(reader: Reader, folder: Folder, source: Source, parameter: Parameter) -> None:
    """Fill this rank's part of a parameter from the files, row by row; vocabulary padding is zero."""
    cut = cut_of(parameter)
    columns = cut.ranges()[0] if cut.dim == 1 else None
    place = 0
    for start, stop in cut.ranges() if cut.dim == 0 else [(0, cut.shape[0])]:
        filled = place
        for row, piece in source.within(start, stop):
            rows = reader.rows(folder.files[piece.name], piece.name, piece.start, piece.stop, columns)
            parameter[place + row - start :][: len(rows)].copy_(rows)
            filled = place + row - start + len(rows)
        place += stop - start
        parameter[filled:place].zero_()


def _check_tied(reader: Reader, folder: Folder, source: Source, parameter: Parameter) -> None:
    [(start, stop)] = cut_of(parameter).ranges()
    for row, piece in source.within(start, stop):
        head = reader.rows(folder.files[_TIED_HEAD], _TIED_HEAD, piece.start, piece.stop)
        if not torch.equal(head.to(parameter), parameter[row - start :][: len(head)]):
            raise ValueError(
                f"{folder.path}: tie_word_embeddings = true, but {_TIED_HEAD} is not model.embed_tokens.weight; set it to false"
            )
