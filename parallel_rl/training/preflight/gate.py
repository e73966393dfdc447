"""The gate before a long run: all ranks are up, groups communicate, and the run's losses are right on its layout."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from parallel_rl.agreement import describe, raise_on_all_ranks
from parallel_rl.cluster.progress import doing, tick
from parallel_rl.groups import ParallelGroups, current_device, reduce_
from parallel_rl.losses.choice import LossConfig
from parallel_rl.losses.prm import PRMLossFn
from parallel_rl.testing import hidden_states
from parallel_rl.testing.alone import check_alone, trial_of
from parallel_rl.testing.batches import PLACEHOLDER, REWARD_IDS
from parallel_rl.testing.check import batch_for, check_subject
from parallel_rl.testing.layouts import Layout, Rank
from parallel_rl.testing.subjects import Given, JobRunner
from parallel_rl.testing.whole_step.known_faults import gate_line
from parallel_rl.training.algorithms.phases import phases
from parallel_rl.training.config.sections import ParallelConfig, SamplingConfig, data_parallel_size
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.models.engine import start_groups, start_world
from parallel_rl.training.preflight.facts import run_facts

_TOLERANCE = 1e-9


def own_loss(config: TrainConfig) -> Given:
    """Return the loss of the main phase with its options, temperature and truncation."""
    return own_losses(config)[0]


def own_losses(config: TrainConfig) -> list[Given]:
    """Return the losses of all phases, the main one first, and the critic's, on the kit's vocabulary."""
    main, *others = reversed(phases(config))
    losses = [_built(main.loss, config.sampling if config.rl is not None else None)]
    losses += [_built(phase.loss) for phase in others]
    if config.rl is not None and config.rl.critic is not None:
        losses.append(_built(config.rl.critic.loss))
    return losses


def _built(chosen: LossConfig, sampling: SamplingConfig | None = None) -> Given:
    if sampling is None:
        loss = chosen.build()
    else:
        loss = chosen.build(temperature=sampling.temperature, truncation=sampling.truncation)
    if isinstance(loss, PRMLossFn):
        loss.config = replace(loss.config, placeholder_token_id=PLACEHOLDER, reward_token_ids=tuple(REWARD_IDS))
    return Given(loss)


def check_losses(config: TrainConfig) -> list[str]:
    """Compare the run's losses with one process, on Megatron's current groups; return their names.

    Compares loss, gradient and metrics on rows of the run's kind (padded, packed, prefix trees), in one and in three
    micro-batches, from logits and, with `model.fused_head`, from hidden states. RuntimeError on all ranks if a loss
    breaks the law, with the diagnosis.
    """
    sizes, groups = config.parallel, ParallelGroups.from_megatron()
    data = data_parallel_size(sizes, dist.get_world_size())
    kind = "tree" if config.batch.share_prefixes else "packed+padding"
    packing = kind if config.batch.packing else "padded"
    layouts = [Layout(sizes.tensor, sizes.context, data, packing, number, "zigzag") for number in (1, 3)]
    rank = Rank(groups, (groups.tp_rank, groups.cp_rank, groups.dp_rank), current_device())
    runner = JobRunner(lambda layout: rank)
    names = []
    for subject in own_losses(config):
        report = check_subject(subject, {layouts[0].world: layouts}, runner)
        if not report.ok:
            raise RuntimeError(f"the loss of this run must not train on this layout: {report}")
        if config.model.fused_head and hidden_states.takes_head(subject):
            _check_fused(subject, layouts, rank, sizes.pipeline)
        names.append(subject.name)
    return names


def _check_fused(subject: Given, layouts: Sequence[Layout], rank: Rank, stages: int) -> None:
    batch = batch_for(subject, {layouts[0].world: layouts})
    trial = trial_of(subject, batch, check_alone(0, subject, batch))
    for variant, layout in enumerate(layouts):
        outcome = hidden_states.run_layout(layout, trial, rank, variant)
        weight = outcome.weight.to(rank.device)
        dist.all_reduce(weight)
        outcomes = [outcome] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        mine = parallel_state.get_pipeline_model_parallel_rank()
        stages_of = [mine] * dist.get_world_size()
        dist.all_gather_object(stages_of, mine)
        of_stage = [(result, weight.cpu() / stages) for result, at in zip(outcomes, stages_of, strict=True) if at == 0]
        wrong = hidden_states.faults(batch, trial.want, {layout.name: of_stage}, _TOLERANCE)
        if wrong:
            raise RuntimeError(
                f"{subject.name} from hidden states (model.fused_head) differs from one process: "
                f"{'; '.join(sorted(set(wrong)))}. Set it to false"
            )


_GRACE = 2.0  # seconds for rank 0 to notify the others, and for each to report where it hangs before one exits
_MESSAGE = 1 << 16  # numbers that neighbours exchange: enough to take the same path as activations


def pass_gate(config: TrainConfig, seconds: float) -> None:
    """Check that all ranks are up, form the layout's groups, and check the run's losses on them.

    The run keeps the groups. `seconds` after the last rank came up, an unfinished check ends this process with status 1
    and names the ranks and hosts that are behind. ValueError if ranks or the rendezvous are missing, or the world does
    not match the layout; RuntimeErrors of `check_groups` and `check_losses`.
    """
    began = time.monotonic()
    if (world := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        store = check_in(seconds)
        end = time.monotonic() + seconds
        with _ends(store, "the process group was not formed", "world", end, seconds):
            start_world(config)
        with _ends(store, "the groups were not checked", "groups", end, seconds):
            check_groups(config.parallel, config.run.seed, config.run.timeout)
        with _ends(store, "the losses were not checked", "losses", end, seconds):
            names = check_losses(config)
    else:
        start_world(config)
        check_groups(config.parallel, config.run.seed, config.run.timeout)
        names = check_losses(config)
    if dist.get_rank() == 0:
        took = time.monotonic() - began
        text = f"gate: {world} ranks are up; {', '.join(names)}: the numbers of one process on this run's layout ({took:.1f} s)"
        print(f"{text}\ngate: {gate_line(run_facts(config))}", flush=True)


def check_in(seconds: float) -> dist.Store:
    """Wait for every rank of torchrun's world, before any process group; return their store.

    ValueError on all ranks if some are missing and none came in the last `seconds`; names them, and under Slurm their
    hosts.
    """
    world = int(os.environ["WORLD_SIZE"])
    try:
        store, rank, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
    except (dist.DistError, TimeoutError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ValueError(f"the rendezvous at {where} was not reachable within {seconds:g} s: {error}") from None
    store.set(f"gate/up/{rank}", "")
    number, end = store.add("gate/number", 1), time.monotonic() + seconds
    while not store.check(["gate/verdict"]):
        if rank == 0 and number == world:
            store.set("gate/verdict", "")
        elif rank == 0 and time.monotonic() > end:
            missing = _missing(store, "up", range(world))
            store.set("gate/verdict", f"{_named(missing)} did not come up in {seconds:g} s" if missing else "")
        elif time.monotonic() > end + _GRACE:
            raise ValueError(f"{_named([0])} did not come up in {seconds:g} s")
        time.sleep(0.05)
        if (now := store.add("gate/number", 0)) > number:  # the limit counts from the last rank up
            number, end = now, time.monotonic() + seconds
    if verdict := store.get("gate/verdict").decode():
        raise ValueError(verdict)
    return store


def check_groups(config: ParallelConfig, seed: int = 0, timeout: float = 1800.0) -> None:
    """Form the layout's groups, and count and test them; RuntimeError on all ranks if one is wrong."""
    tick("forming the groups")
    start_groups(config, seed, timeout)
    device = current_device()
    groups, ranks = ParallelGroups.from_megatron(), data_parallel_size(config, dist.get_world_size())
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    tick("summing over the groups")
    sizes = {"tensor": groups.tensor, "context": groups.context, "data": groups.data, "pipeline": pipeline}
    sums = {name: reduce_(torch.ones(1, device=device), group) for name, group in sizes.items()}
    wanted = {"tensor": config.tensor, "context": config.context, "data": ranks, "pipeline": config.pipeline}
    broken = _exchange(pipeline, device)

    def verdict() -> None:
        if broken:
            raise RuntimeError(broken)
        for name, size in wanted.items():
            if float(sums[name]) != size:
                raise RuntimeError(f"the {name} group has {float(sums[name]):g} ranks instead of {size}")

    raise_on_all_ranks(verdict, what="the gate before the run")
    tick("checking the run's losses")


@contextlib.contextmanager
def _ends(store: dist.Store, what: str, stage: str, at: float, seconds: float) -> Iterator[None]:
    """End the process if the body hangs; a collective that a rank never enters would wait far longer."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def end() -> None:
        behind = _missing(store, f"{stage}/begun", range(world))
        who = f"{_named(behind)} did not begin" if behind else f"{_named(_missing(store, stage, range(world)))} hang"
        text = f"{what} in {seconds:g} s: {who}; this rank was {doing()}"
        print(f"parallel-rl: error (rank {rank}): {text}", file=sys.stderr, flush=True)
        time.sleep(_GRACE)
        os._exit(1)

    tick("forming the world")
    store.set(f"gate/{stage}/begun/{rank}", "")
    timer = threading.Timer(max(at - time.monotonic(), 0.0), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    store.set(f"gate/{stage}/{rank}", "")


def _missing(store: dist.Store, stage: str, ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if not store.check([f"gate/{stage}/{rank}"])]


def _exchange(pipeline: dist.ProcessGroup, device: torch.device) -> str:
    """Send each rank's number to its pipeline neighbours and back; return the error, or ""."""
    ranks, place, rank = dist.get_process_group_ranks(pipeline), dist.get_rank(pipeline), dist.get_rank()
    wrong = []
    for turn in (0, 1):  # pairs that share no rank at a time, so that a broken one holds up no other
        there = place + (1 if (place + turn) % 2 == 0 else -1)
        if not 0 <= there < len(ranks):
            continue
        peer = ranks[there]
        tick(f"exchanging with rank {peer}, its neighbour in the pipeline")
        sent = torch.full((_MESSAGE,), float(rank), device=device)
        received = torch.full_like(sent, -1.0)
        ways = [dist.P2POp(dist.isend, sent, peer, pipeline), dist.P2POp(dist.irecv, received, peer, pipeline)]
        try:
            for work in dist.batch_isend_irecv(ways):
                work.wait()
            if not bool((received == peer).all()):
                wrong.append(f"rank {rank} received wrong numbers from its pipeline neighbour rank {peer}")
        except RuntimeError as error:
            wrong.append(f"rank {rank} cannot exchange with its pipeline neighbour rank {peer}: {describe(error)}")
    return "; ".join(wrong)


def _named(ranks: Sequence[int]) -> str:
    """List ranks, with their nodes if torchrun's numbering and Slurm reveal them."""
    text = f"rank {', '.join(map(str, ranks))}"
    size = os.environ.get("LOCAL_WORLD_SIZE")
    hosts = os.environ.get("PARALLEL_RL_HOSTS", "").split()
    if size is None or not hosts:
        return text
    nodes = sorted({rank // int(size) for rank in ranks})
    return f"{text} (on {', '.join(hosts[node] for node in nodes if node < len(hosts))})"
