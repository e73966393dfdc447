"""GRPO on Megatron in one file: torchrun --nproc-per-node 4 examples/megatron_grpo.py --tp 2 --cp 2

A tiny GPT learns to repeat the digit in its prompt. Read `train` from top to bottom: prompts, rollouts, rewards,
advantages, old log-probs, and optimizer steps on packed micro-batches, each in a few lines. One process works too
(torchrun --nproc-per-node 1). The rewards are the same on every layout, up to the rounding of sums.

The example does not save checkpoints, evaluate, penalise a KL to a reference, keep a cache of keys and values (each
token runs the whole prefix again), take prompts of different lengths, split the model over pipeline stages, or train
in bfloat16. `parallel-rl train configs/grpo_arithmetic.yaml` does most of this.
"""

import argparse
import os

import torch
import torch.distributed as dist

from parallel_rl import ParallelGroups, PolicyLossFn, token_logprobs
from parallel_rl import megatron as m
from parallel_rl.advantages import estimate
from parallel_rl.vocab.sampling import sample_keys, sample_tokens

EQUALS, END, VOCAB = 10, 11, 12  # 0 to 9 are the digits
PROMPT, ANSWER = 2, 6  # tokens: "7 =", to be answered by "7 7 7 7 7 7"
PROMPTS, SAMPLES, MICRO_BATCH = 16, 8, 64  # prompts in a step, samples of each, sequences in a micro-batch


def sample(model: torch.nn.Module, prompts: torch.Tensor, ids: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """[N, PROMPT] prompts to [N, PROMPT + ANSWER] tokens, drawn from the sharded logits, which are never gathered.

    The draws depend on the samples' ids alone, so every layout draws the same tokens from the same weights.
    """
    tokens = torch.cat([prompts, prompts.new_zeros(len(prompts), ANSWER)], dim=1)
    with m.replicas([model]), torch.no_grad():  # inside, context ranks run whole sequences, of any length
        for place in range(PROMPT, PROMPT + ANSWER):
            logits = m.forward_logits(model, m.padded_input(tokens[:, :place], m.ALONE))
            keys = sample_keys(0, ids, torch.full_like(ids, place))
            tokens[:, place] = sample_tokens(logits[:, -1], keys, group=groups.tensor, vocab_size=VOCAB)
    dist.broadcast(tokens, group=groups.context, group_src=0)  # context ranks sampled the same; make it certain
    return tokens


def answer_mask(tokens: torch.Tensor) -> torch.Tensor:
    """[N, S] bool: the answer up to and with its first END."""
    ended = (tokens == END).cumsum(1) - (tokens == END).long()  # ENDs before a place
    return (torch.arange(tokens.shape[1], device=tokens.device) >= PROMPT) & (ended == 0)


def reward(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N] the fraction of the answer's places that hold the prompt's digit."""
    return ((tokens == tokens[:, :1]) & mask).sum(1) / ANSWER


def train(tp: int, cp: int, steps: int, updates: int = 2) -> list[float]:
    """The mean reward of each step's rollouts."""
    m.initialize(tp, cp)
    config = m.build_config(num_layers=2, hidden_size=64, num_attention_heads=4, sequence_parallel=tp > 1)
    model = m.wrap_model(m.build_model(config, VOCAB, PROMPT + ANSWER))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    loss_fn = PolicyLossFn({"surrogate": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28}}, vocab_size=VOCAB)
    groups, device = ParallelGroups.from_megatron(), next(model.parameters()).device
    rewards_of_steps = []
    for step in range(steps):
        # Prompts: every rank has all prompts of the step; a data rank samples its part of the rows.
        digits = torch.randint(0, 10, (PROMPTS,), generator=torch.Generator().manual_seed(step)).to(device)
        rows = torch.arange(PROMPTS * SAMPLES, device=device).tensor_split(groups.dp_size)[groups.dp_rank]
        shown = digits[rows // SAMPLES]

        # Rollouts and their rewards.
        tokens = sample(model, torch.stack([shown, torch.full_like(shown, EQUALS)], 1), step * len(rows) + rows, groups)
        mask = answer_mask(tokens)
        rewards = reward(tokens, mask)

        # Advantages: compare a reward with the others of its prompt, which may be on other data ranks.
        group = {"rewards": rewards, "group_ids": rows // SAMPLES, "token_mask": mask}
        advantages = estimate({"name": "grpo", "normalize": "std"}, group, groups).advantages

        # Micro-batches: whole rows for the loss, packed ones for the model.
        data = {
            "input_ids": tokens,
            "token_mask": mask,
            "sample_mask": torch.ones_like(rewards),
            "advantages": advantages,
        }
        lengths = PROMPT + mask.sum(1)
        batches = [
            m.packed_batch({name: field[part] for name, field in data.items()}, lengths[part])
            for part in torch.arange(len(rows)).split(MICRO_BATCH)
        ]

        # Old log-probs, before the first update moves the policy.
        for index, batch in enumerate(batches):
            with torch.no_grad():
                logits = m.forward_logits(model, batch.input)
            call = groups.tp_rank, groups.tensor, groups.context
            old = token_logprobs(logits, batch.data, *call, layout=batch.input.layout, vocab_size=VOCAB)
            batches[index] = batch.with_data(prev_logprobs=old)

        # Updates: the clipped loss of all micro-batches and data ranks, its gradient, one optimizer step.
        for _ in range(updates):
            model.zero_grad_buffer()
            report = m.forward_backward(model, loss_fn, batches)
            m.clip_grads_(model, 1.0, m.grad_norm(model))
            m.copy_main_grads(model)
            optimizer.step()

        total = rewards.sum()
        dist.all_reduce(total, group=groups.data)
        rewards_of_steps.append(total.item() / (PROMPTS * SAMPLES))
        if dist.get_rank() == 0 and step % 5 == 0:
            numbers = report.floats()
            print(f"step {step:3}  reward {rewards_of_steps[-1]:.3f}  loss {numbers['loss']:+.4f}", flush=True)
    return rewards_of_steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(args.tp, args.cp, args.steps)
    m.destroy()
    dist.destroy_process_group()
