"""Table of names: each parameter of Megatron's whole model as rows of Hugging Face's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallel_rl.config.architecture import Architecture
from parallel_rl.megatron.weights import EMBEDDING, HEAD


@dataclass(frozen=True)
class Rows:
    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Source:
    """A parameter as consecutive rows (width `columns`; None: a vector) of other tensors, then padding."""

    rows: tuple[Rows, ...]
    columns: int | None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors of the rows with their shapes; each of their rows is used once."""
        heights: dict[str, int] = {}
        for piece in self.rows:
            heights[piece.name] = max(heights.get(piece.name, 0), piece.stop)
        tail = () if self.columns is None else (self.columns,)
        return {name: (height, *tail) for name, height in heights.items()}

    def within(self, start: int, stop: int) -> Iterator[tuple[int, Rows]]:
        """Iterate over the pieces of the parameter's rows [start, stop), each with its first row there."""
        at = 0
        for piece in self.rows:
            low, high = max(start, at), min(stop, at + piece.stop - piece.start)
            if low < high:
                yield low, Rows(piece.name, piece.start + low - at, piece.start + high - at)
            at += piece.stop - piece.start


def table(model: Architecture, *, scalar_head: bool = False) -> dict[str, Source]:
    """Return the source of every parameter of the whole model, by its `spelled_locally` name.

    >>> from parallel_rl.config.architecture import Architecture
    >>> small = Architecture("qwen3", 1, hidden=8, heads=4, groups=2, head_dim=4, ffn=6, vocab=10, qk_norm=True)
    >>> [(piece.name[-13:], piece.start, piece.stop) for piece in
    ...  table(small)["decoder.layers.0.self_attention.linear_qkv.weight"].rows[:3]]
    [('q_proj.weight', 0, 8), ('k_proj.weight', 0, 4), ('v_proj.weight', 0, 4)]
    """
    sources = {
        EMBEDDING: _whole("model.embed_tokens.weight", model.vocab, model.hidden),
        "decoder.final_layernorm.weight": _whole("model.norm.weight", model.hidden),
    }
    if scalar_head:
        sources[HEAD] = _whole("score.weight", 1, model.hidden)
    elif not model.tied:
        sources[HEAD] = _whole("lm_head.weight", model.vocab, model.hidden)
    for layer in range(model.layers):
        for name, source in _layer(model, f"model.layers.{layer}."):
            sources[f"decoder.layers.{layer}.{name}"] = source
    return sources


def _layer(model: Architecture, at: str) -> Iterator[tuple[str, Source]]:
    attention, hidden = f"{at}self_attn.", model.hidden
    yield "input_layernorm.weight", _whole(f"{at}input_layernorm.weight", hidden)
    yield "self_attention.linear_qkv.weight", _interleaved(model, attention, "weight", hidden)
    if model.qkv_bias:
        yield "self_attention.linear_qkv.bias", _interleaved(model, attention, "bias", None)
    if model.qk_norm:
        for name in "qk":
            yield f"self_attention.{name}_layernorm.weight", _whole(f"{attention}{name}_norm.weight", model.head_dim)
    width = model.heads * model.head_dim
    yield "self_attention.linear_proj.weight", _whole(f"{attention}o_proj.weight", hidden, width)
    yield "pre_mlp_layernorm.weight", _whole(f"{at}post_attention_layernorm.weight", hidden)
    if model.experts is None:
        yield from _mlp("mlp.", f"{at}mlp.", model.ffn, hidden)
        return
    yield "mlp.router.weight", _whole(f"{at}mlp.gate.weight", model.experts.number, hidden)
    for expert in range(model.experts.number):
        names = f"mlp.experts.local_experts.{expert}.", f"{at}mlp.experts.{expert}."
        yield from _mlp(*names, model.experts.ffn_hidden, hidden)


def _mlp(ours: str, theirs: str, ffn: int, hidden: int) -> Iterator[tuple[str, Source]]:
    gate, up = (Rows(f"{theirs}{name}_proj.weight", 0, ffn) for name in ("gate", "up"))
    yield f"{ours}linear_fc1.weight", Source((gate, up), hidden)
    yield f"{ours}linear_fc2.weight", _whole(f"{theirs}down_proj.weight", hidden, ffn)


def _whole(name: str, rows: int, columns: int | None = None) -> Source:
    return Source((Rows(name, 0, rows),), columns)


def _interleaved(model: Architecture, at: str, kind: str, columns: int | None) -> Source:
    """Interleave for each key-value group its query heads, keys and values."""
    width = {"q": model.heads // model.groups * model.head_dim, "k": model.head_dim, "v": model.head_dim}
    pieces = [
        Rows(f"{at}{name}_proj.{kind}", group * rows, (group + 1) * rows)
        for group in range(model.groups)
        for name, rows in width.items()
    ]
    return Source(tuple(pieces), columns)
