"""Rollouts from sharded logits; any layout samples the same tokens from the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from parallel_rl.agreement import sum_over_groups
from parallel_rl.cluster.progress import tick
from parallel_rl.experience.samples import Samples
from parallel_rl.megatron import ALONE, broadcast_from_last_stage, forward_logits, forward_only, padded_input, replicas
from parallel_rl.training.config.sections import SamplingConfig
from parallel_rl.training.models.engine import Engine
from parallel_rl.vocab.sampling import sample_keys, sample_tokens
from parallel_rl.vocab.stats import token_stats
from parallel_rl.vocab.truncated_stats import truncated_token_stats

ROWS_AT_A_TIME = 1024  # bounds the logits of a decoding position


def sample(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sample_ids: Sequence[int],
    seed: int,
    config: SamplingConfig,
    *,
    greedy: bool = False,
) -> Samples:
    """Continue each of N ≥ 0 prompts up to one of the end tokens or `max_new_tokens`.

    The sampling key at position t of sample i is (seed, sample_ids[i], t), with ids unique over the run. Tensor,
    context and pipeline ranks have the same prompts and get the same samples. Context ranks act as data replicas,
    without sequence parallelism. `greedy` takes the most likely token each time.
    """
    count, width = len(prompts), max(map(len, prompts), default=0) + config.max_new_tokens
    tokens = torch.full((count, width), engine.vocabulary.pad)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
    ids = torch.tensor(sample_ids, dtype=torch.int64)
    logprobs = torch.zeros(count, width, dtype=engine.float_dtype)
    lengths = prompt_lengths.clone()
    groups = engine.groups
    mine = range(groups.cp_rank * count // groups.cp_size, (groups.cp_rank + 1) * count // groups.cp_size)
    with replicas([engine.model]), torch.no_grad():
        engine.model.eval()
        for first in range(mine.start, mine.stop, ROWS_AT_A_TIME):
            rows = slice(first, min(first + ROWS_AT_A_TIME, mine.stop))
            _decode(engine, tokens[rows], logprobs[rows], lengths[rows], ids[rows], seed, config, greedy)
        engine.model.train()
    if groups.cp_size > 1:
        _exchange(engine, mine, [tokens, logprobs, lengths])
    column = torch.arange(width)
    mask = (column >= prompt_lengths[:, None]) & (column < lengths[:, None])
    return Samples(tokens, mask, lengths, generation_logprobs=logprobs)


def _decode(
    engine: Engine,
    tokens: Tensor,
    logprobs: Tensor,
    lengths: Tensor,
    sample_ids: Tensor,
    seed: int,
    config: SamplingConfig,
    greedy: bool,
) -> None:
    """Fill the rows in place, position by position, rerunning the whole prefix (no cache)."""
    alive, ends = torch.arange(len(lengths)), torch.tensor(sorted(engine.vocabulary.ends))
    for _ in range(config.max_new_tokens):
        tick("sampling")
        at = lengths[alive]
        keys = sample_keys(seed, sample_ids[alive], at)
        drawn, scores = _draw(engine, tokens[alive, : int(at.max())], at - 1, keys, config, greedy)
        tokens[alive, at], logprobs[alive, at] = drawn, scores
        lengths[alive] += 1
        alive = alive[torch.isin(drawn, ends, invert=True)]
        if not len(alive):
            return


def _draw(
    engine: Engine, prefix: Tensor, last: Tensor, keys: Tensor, config: SamplingConfig, greedy: bool
) -> tuple[Tensor, Tensor]:
    """Sample one token per row, with its log-prob, from the last stage's logits at column `last`."""

    def collect(logits: Tensor, index: int) -> Tensor:
        at_last = logits[torch.arange(len(last), device=logits.device), last.to(logits.device)]
        group, size = engine.groups.tensor, engine.vocab_size
        rule = config.truncation
        heat, top_k, top_p = (0.0, None, None) if greedy else (config.temperature, rule.top_k, rule.top_p)
        drawn = sample_tokens(
            at_last, keys.to(logits.device), temperature=heat, top_k=top_k, top_p=top_p, group=group, vocab_size=size
        )
        score = partial(truncated_token_stats, top_k=rule.top_k, top_p=rule.top_p) if rule else token_stats
        stats = score(at_last, drawn, group=group, vocab_size=size, temperature=config.temperature, entropy=False)
        # one broadcast for both: a token id is exact in float64
        return torch.stack([drawn.double(), stats.logprobs.double()])

    outputs = forward_only(
        lambda model, tokens: forward_logits(model, padded_input(tokens, ALONE)),
        [engine.model],
        [prefix.to(engine.device)],
        collect,
        seq_length=prefix.shape[1],
        micro_batch_size=prefix.shape[0],
    )
    both = broadcast_from_last_stage(outputs[0] if outputs else None, shape=(2, len(last)), dtype=torch.float64).cpu()
    return both[0].long(), both[1].to(engine.float_dtype)


def _exchange(engine: Engine, mine: range, fields: Sequence[Tensor]) -> None:
    """Exchange rows between context ranks in place, by summing tensors that are zero elsewhere."""
    for field in fields:
        part = torch.zeros_like(field)
        part[mine.start : mine.stop] = field[mine.start : mine.stop]
        field.copy_(sum_over_groups(part, [engine.groups.context]))
