"""Losses in the calls of hosts over tensor, context and data ranks: each layout has the numbers of one process.

One world of four ranks runs every case: where a host hands over logits (slime, torchtitan, Transformers) their words are cut
unevenly, with columns of padding; where it hands over log-probs (NeMo-RL, verl) those are read over the tensor ranks first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from parallel_rl import NLLLoss, ParallelGroups, PolicyLossFn, token_stats
from parallel_rl.hosts import nemo_rl, verl
from parallel_rl.hosts.slime import custom_loss
from parallel_rl.hosts.torchtitan import HostLoss
from parallel_rl.hosts.transformers import compute_loss_func
from parallel_rl.testing.pool import preload, run_world
from tests.hosts import rows, test_slime, test_torchtitan

preload("tests.hosts.test_ranks", "parallel_rl", "torch.distributed.tensor")
V = test_slime.V  # 7 words in shards of 4, the last column being padding
TEMPERATURE = test_slime.TEMPERATURE
MEAN = {"aggregation": "seq-mean-token-mean"}
PPO = {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28}


@dataclass(frozen=True)
class Case:
    """Options of ours, and slime's arguments for the same loss: by their own names, the rest is off."""

    options: dict[str, object]
    per_token: bool = False
    args: dict[str, object] = field(default_factory=dict)


KL = {"coefficient": 0.1, "estimator": "k3", "gradient": "plain"}
SIBLINGS = (5.0, 5.0, 1.0, 4.0)  # the first two samples are of one rollout of 2 + 3 tokens


def kl(estimator: str, unbiased: bool = False) -> Case:
    penalty = {"coefficient": 0.1, "estimator": estimator, "gradient": "old" if unbiased else "plain"}
    return Case({"surrogate": PPO, "kl": penalty, **MEAN}, args={"kl": estimator, "unbiased": unbiased})


CASES = [
    Case({"surrogate": {**PPO, "dual_clip": 1.5}}, True, {"eps_clip_c": 1.5}),
    Case({"surrogate": PPO, "entropy_bonus": 0.2, **MEAN}, args={"entropy_coef": 0.2}),
    Case({"surrogate": PPO, "ratio_level": "sequence-mean"}, True, {"estimator": "gspo"}),
    Case({"surrogate": PPO, "ratio_level": "sequence-mean", **MEAN}, args={"estimator": "gspo"}),
    Case({"surrogate": {"name": "cispo", "clip_low": 0.2, "clip_high": 0.28}}, True, {"estimator": "cispo"}),
    *(kl(estimator) for estimator in ("k1", "k2", "k3", "low_var_kl")), kl("k3", True), kl("low_var_kl", True),
    Case({"surrogate": PPO, "importance": {"mode": "tis", "low": 0.5, "high": 1.2}, **MEAN}, args={"tis": "clamp"}),
    Case({"surrogate": PPO, "importance": {"mode": "icepop", "low": 0.5, "high": 1.2}}, True, {"tis": "icepop"}),
    Case({"surrogate": PPO, "off_policy_mask": {"delta": 0.05}, **MEAN}, args={"opsm_delta": 0.05}),
    Case({"surrogate": PPO}, True, {"use_rollout_logprobs": True}),
    Case({"surrogate": PPO, "entropy_bonus": 0.2, "kl": KL, **MEAN}, args={"entropy_coef": 0.2, "kl": "k3", "siblings": True}),
    Case({"surrogate": PPO, "ratio_level": "sequence-mean", **MEAN}, args={"estimator": "gspo", "siblings": True}),
]  # fmt: skip


def rollouts() -> tuple[list[Tensor], dict[str, list]]:
    logits, batch = test_slime.rollouts()
    g = torch.Generator().manual_seed(9)
    noise = [0.4 * torch.randn(x.shape, generator=g, dtype=x.dtype) for x in batch["log_probs"]]
    return logits, batch | {"rollout_log_probs": [x + y for x, y in zip(batch["log_probs"], noise, strict=True)]}


def slimes(logits: list[Tensor], batch: dict[str, list], case: Case) -> Tensor:
    """slime's policy loss of whole samples, from its formulas; what it divides by afterwards is left out."""
    args, total = case.args, torch.zeros((), dtype=torch.float64)
    for i, (n, r) in enumerate(test_slime.SAMPLES):
        ids, mask, a = batch["unconcat_tokens"][i], batch["loss_masks"][i], batch["advantages"][i]
        at = (logits[i] / TEMPERATURE).log_softmax(-1)[n - r - 1 : n - 1]
        new, sampler = at.gather(-1, ids[n - r :, None])[:, 0], batch["rollout_log_probs"][i]
        old = sampler if args.get("use_rollout_logprobs") else batch["log_probs"][i]
        drift = ((old - new) * mask).sum() / mask.sum()
        ratio = (-drift if args.get("estimator") == "gspo" else new - old).exp().expand(r)
        x = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
        if args.get("estimator") == "cispo":
            x = -ratio.clamp(0.8, 1.28).detach() * a * new
        if "eps_clip_c" in args:
            x = torch.where(a < 0, torch.minimum(x, -args["eps_clip_c"] * a), x)  # type: ignore[operator]
        if "opsm_delta" in args:
            x = torch.where((a < 0) & (drift > args["opsm_delta"]), 0, x)
        weight = (batch["log_probs"][i] - sampler).exp()
        if args.get("tis") == "clamp":
            x = x * weight.clamp(0.5, 1.2)
        elif args.get("tis") == "icepop":
            x = torch.where((weight >= 0.5) & (weight <= 1.2), weight, 0) * x
        if "entropy_coef" in args:
            x = x + args["entropy_coef"] * (at.exp() * at).sum(-1)
        if "kl" in args:
            d = batch["ref_log_probs"][i] - new
            by = {"k1": -d, "k2": d.square() / 2}.get(str(args["kl"]), d.exp() - 1 - d)
            by = by * (new - old).exp() if args.get("unbiased") else by
            x = x + 0.1 * (by.clamp(-10, 10) if args["kl"] == "low_var_kl" else by)
        by_rollout = SIBLINGS[i] if args.get("siblings") else mask.sum()
        total = total + (x * mask).sum() / (1 if case.per_token else by_rollout)
    return total


def hosted(logits: Tensor, batch: dict[str, list], case: Case, groups: ParallelGroups) -> Tensor:
    args = SimpleNamespace(calculate_per_token_loss=case.per_token, rollout_temperature=TEMPERATURE, **case.args)
    return custom_loss(PolicyLossFn(case.options, vocab_size=V), groups)(args, batch, logits, None)[0]


def cut_words(logits: Tensor, groups: ParallelGroups) -> Tensor:
    """This rank's columns of logits that are padded with NaN to a width that the tensor ranks divide."""
    width = -(-logits.shape[-1] // groups.tp_size)
    padded = pad(logits, (0, width * groups.tp_size - logits.shape[-1]), value=torch.nan)
    return padded[..., groups.tp_rank * width : (groups.tp_rank + 1) * width]


def summed(found: Tensor, leaves: list[Tensor], shares: list[object]) -> list[Tensor]:
    """The loss over the ranks that share it, and gradients over all ranks, NaN where nothing is read being none."""
    total = found.detach().clone()
    for group in shares:
        dist.all_reduce(total, group=group)  # type: ignore[arg-type]
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.nan_to_num(0.0) for leaf in leaves]
    for gradient in gradients:
        dist.all_reduce(gradient)
    return [total, *gradients]


def differ(found: list[Tensor], want: Tensor, leaves: list[Tensor]) -> bool:
    right = [want.detach(), *torch.autograd.grad(want, leaves)]
    return not all(torch.allclose(x, y, rtol=1e-9, atol=1e-11) for x, y in zip(found, right, strict=True))


def of_slime(groups: ParallelGroups, names: list[str], first: int, every: int) -> list[str]:
    wrong = []
    for i, case in list(enumerate(CASES))[first::every]:
        truth, batch = rollouts()
        if case.args.get("siblings"):
            batch["rollout_mask_sums"] = [torch.tensor(n) for n in SIBLINGS]
        leaves = [x.clone().requires_grad_() for x in truth]
        mine = [j for j in range(len(truth)) if j % groups.dp_size == groups.dp_rank]
        parts = [cut_words(x, groups) for x in leaves]
        own = {name: [values[j] for j in mine] for name, values in batch.items()}
        row = torch.cat([parts[j] for j in mine])
        if groups.cp_size > 1:
            named = test_slime.cut(leaves, batch, groups.cp_rank)[1] | {
                "rollout_log_probs": test_slime.cut_field(batch["rollout_log_probs"], groups.cp_rank)
            }
            own = {name: [values[j] for j in mine] for name, values in named.items()}
            row = torch.cat(
                [test_slime.zigzag(parts[j], test_slime.SAMPLES[j][0], groups.cp_rank, torch.nan) for j in mine]
            )
        tail = row.new_full((3, row.shape[1]), torch.nan)
        loss = hosted(torch.cat([row, tail])[None], own, case, groups)
        loss.backward()
        found = summed(loss, leaves, [g for g in (groups.context, groups.data) if g is not None])
        whole = [x.requires_grad_() for x in truth]
        if differ(found, slimes(whole, batch, case), whole):
            wrong.append(f"slime {i} on {names}")
    return wrong


def of_torchtitan(groups: ParallelGroups, mesh, names: list[str]) -> list[str]:  # type: ignore[no-untyped-def]
    """Plain shards with padding columns, and a DTensor of an uneven vocabulary; micro-batches over data ranks."""
    from torch.distributed.tensor import Shard, distribute_tensor

    data, wrong = test_torchtitan.packed(), []
    size = -(-test_torchtitan.T // groups.dp_size)
    mine = slice(groups.dp_rank * size, (groups.dp_rank + 1) * size)
    fields = {name: data[name][mine] for name in ("generator_logprobs", "advantages", "loss_mask")}
    for as_dtensor in (False, True):
        leaf = data["logits"].clone().requires_grad_()
        if as_dtensor:
            logits = distribute_tensor(leaf[mine].detach(), mesh["tp"], [Shard(-1)]).requires_grad_()
        else:
            logits = cut_words(leaf[mine], groups)
        policy = PolicyLossFn(test_torchtitan.PPO, vocab_size=test_torchtitan.V)
        loss, _ = HostLoss(policy, groups)(logits, data["labels"][mine], 6, **fields)
        loss.backward()
        if as_dtensor:
            leaf.grad = torch.zeros_like(leaf)
            leaf.grad[mine] = logits.grad.full_tensor() / groups.tp_size  # which sums it over all ranks
        found = summed(loss, [leaf], [groups.data] if groups.data is not None else [])
        truth = data["logits"].clone().requires_grad_()
        known = (data["generator_logprobs"], data["advantages"], data["loss_mask"])
        if differ(found, test_torchtitan.dapo(truth, data["labels"], 6, *known), [truth]):
            wrong.append(f"torchtitan {'DTensor' if as_dtensor else 'shards'} on {names}")
    return wrong


def of_rows(groups: ParallelGroups, mesh, names: list[str]) -> list[str]:  # type: ignore[no-untyped-def]
    """Transformers on logits, NeMo-RL and verl on log-probs over tensor ranks; rows over data ranks."""
    from torch.distributed.tensor import Shard, distribute_tensor

    g = torch.Generator().manual_seed(3)
    step, wrong = rows.step(), []
    size, words = rows.A + 1, 9
    whole = torch.randn(rows.B, size, words, generator=g, dtype=torch.float64)
    ids = torch.randint(0, words, (rows.B, size), generator=g)
    half = rows.B // groups.dp_size
    mine = slice(groups.dp_rank * half, (groups.dp_rank + 1) * half)
    plain, truth = rows.clean(step), whole.clone().requires_grad_()
    scored = pad(step["mask"], (1, 0)) != 0
    new = truth[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    want_policy = (rows.ppo(new, plain) * plain["mask"]).sum() / 17
    labels = torch.where(scored, ids, -100)
    want_nll = cross_entropy(truth[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / 17
    policy = PolicyLossFn({"surrogate": PPO})
    info = {"dp_size": groups.dp_size, "batch_num_tokens": 17, "global_batch_size": rows.B}
    fields = {"advantages": "advantages", "prev_logprobs": "old", "token_mask": "mask"}
    batch = {name: pad(step[ours][mine], (1, 0)) for name, ours in fields.items()}
    batch["sample_mask"] = torch.ones(half)
    for host in ("transformers", "transformers DTensor", "nemo_rl", "verl"):
        leaf = whole.clone().requires_grad_()
        logits = cut_words(leaf[mine], groups)
        if host == "transformers":
            call = compute_loss_func(NLLLoss(vocab_size=words), groups)
            loss = call(SimpleNamespace(logits=logits), labels[mine], num_items_in_batch=17)
        elif host == "transformers DTensor":
            logits = distribute_tensor(whole[mine], mesh["tp"], [Shard(-1)]).requires_grad_()
            call = compute_loss_func(NLLLoss(), groups)
            loss = call(SimpleNamespace(logits=logits), labels[mine], num_items_in_batch=17)
        else:
            read = token_stats(logits[:, :-1], ids[mine][:, 1:], group=groups.tensor, vocab_size=words).logprobs
            if host == "nemo_rl":
                loss, _ = nemo_rl.HostLoss(policy)(read, batch, torch.tensor(rows.B), torch.tensor(17))
            else:
                settings, part = SimpleNamespace(global_batch_info=info), {k: x[mine] for k, x in step.items()}
                call = verl.policy_loss(policy)
                loss = call(part["old"], read, part["advantages"], part["mask"], "token-mean", settings)[0]
                loss = loss / groups.dp_size  # as FSDP averages
        loss.backward()
        if host == "transformers DTensor":
            leaf.grad = torch.zeros_like(leaf)
            leaf.grad[mine] = logits.grad.full_tensor() / groups.tp_size
        found = summed(loss, [leaf], [groups.data] if groups.data is not None else [])
        want = want_nll if host.startswith("transformers") else want_policy
        right = [want.detach(), torch.autograd.grad(want, truth, retain_graph=True)[0]]
        if not all(torch.allclose(x, y, rtol=1e-9, atol=1e-11) for x, y in zip(found, right, strict=True)):
            wrong.append(f"{host} on {names}")
    return wrong


def _every_host(rank: int, layouts: list[tuple[tuple[str, ...], tuple[int, ...]]], every: int) -> list[str]:
    """Run each `every`-th case of slime on a layout, beginning with another case on the next layout."""
    from torch.distributed.device_mesh import init_device_mesh

    wrong = []
    for first, (names, sizes) in enumerate(layouts):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        given = {"tp": "tensor", "cp": "context", "dp": "data"}
        groups = ParallelGroups.from_device_mesh(mesh, **{given[name]: name for name in names})
        wrong += of_slime(groups, [*names], first % every, every)
        if "cp" not in names:
            wrong += of_torchtitan(groups, mesh, [*names])
            wrong += of_rows(groups, mesh, [*names])
    return wrong


TENSOR = [(("tp", "cp"), (2, 2)), (("dp", "tp"), (2, 2))]
OTHERS = [(("dp", "cp"), (2, 2)), (("tp",), (4,))]


def test_hosts_over_tensor_ranks() -> None:
    assert run_world(4, _every_host, TENSOR, 8, timeout=200) == [[]] * 4


@pytest.mark.slow
def test_every_case_on_two_of_four_layouts() -> None:
    """Even cases on tensor × context and data × context ranks, odd ones on data × tensor and on tensor ranks alone."""
    assert run_world(4, _every_host, TENSOR + OTHERS, 2, timeout=200) == [[]] * 4
