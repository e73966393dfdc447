"""Completions from servers: one process of each data rank requests and broadcasts; requests in flight survive a restart."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.agreement import communication_device, raise_on_all_ranks
from parallel_rl.cluster.heartbeat import tick
from parallel_rl.experience.completion_server import CompletionServer, Sampling
from parallel_rl.experience.completions import Completion
from parallel_rl.experience.samples import Samples, padded_samples
from parallel_rl.groups import group_rank, group_size
from parallel_rl.training.config.server import ServerConfig
from parallel_rl.training.models.engine import Engine

_LOOK = 20.0  # seconds
_WAITING, _FAILED = 1, 2


@dataclass(frozen=True)
class _Asked:
    """A request for one sample: the prompt it was made for, and the policy that the server had."""

    prompt: int
    version: int
    future: Future[Completion]


class RemoteRollouts:
    """This data rank's source of completions.

    A requested sample stays until it is taken, also over a restart: a checkpoint keeps it (`state_dict`), so that a resumed
    run trains on the same samples, whatever the server would answer now.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        run, sampling = engine.config.run, engine.config.sampling
        self.config, self._engine = config, engine
        self._sharing = engine.replica_groups
        self._asks = all(group_rank(group) == 0 for group in self._sharing)
        wanted = Sampling(
            sampling.max_new_tokens,
            tuple(sorted(engine.vocabulary.ends)),
            engine.vocab_size,
            sampling.temperature,
            2 * run.seed,
            sampling.top_k,
            sampling.top_p,
        )
        self._server = CompletionServer(config, wanted)
        self._asked: dict[int, _Asked] = {}
        self._version = 0  # of the weights that were last sent
        self.updated = False  # by this process: the servers may have been restarted as well

    def request(self, prompts: Sequence[Sequence[int]], sample_ids: Sequence[int]) -> None:
        """Asks for what is not asked for yet, without waiting; does not communicate."""
        if not self._asks:
            return
        known = (self._asked.get(sample) for sample in sample_ids)
        missing = [
            (sample, prompt)
            for sample, prompt, asked in zip(sample_ids, prompts, known, strict=True)
            if asked is None or asked.prompt != _mark(prompt)
        ]
        futures = self._server.submit([prompt for _, prompt in missing], [sample for sample, _ in missing])
        for (sample, prompt), future in zip(missing, futures, strict=True):
            self._asked[sample] = _Asked(_mark(prompt), self._version, future)

    def forget(self, wanted: Collection[int]) -> None:
        """Drops what is asked for and not among `wanted`: the samples of other data ranks, after a change of layout."""
        self._asked = {sample: asked for sample, asked in self._asked.items() if sample in wanted}

    def take(self, prompts: Sequence[Sequence[int]], sample_ids: Sequence[int]) -> tuple[Samples, Tensor]:
        """One completion of each of N prompts (there may be none), and the version of the policy that drew each, [N].

        Every rank calls it; the ranks that hold the same data get the same.

        Raises:
            ValueError: the server failed one rank, on all of them.
        """
        self.request(prompts, sample_ids)
        taken = [self._asked.pop(sample) for sample in sample_ids] if self._asks else []
        well = self._wait([asked.future for asked in taken])

        def read() -> list[Completion]:
            failed = (asked.future.exception() for asked in taken if asked.future.done())
            if error := next((error for error in failed if error is not None), None):
                raise ValueError(str(error))
            return [_known(asked) for asked in taken] if well else []

        try:
            completions = raise_on_all_ranks(read, [*self._sharing, self._engine.groups.data])
            if not well:
                raise ValueError("the completion server failed another rank")
        except ValueError:
            self._server.close()  # what else is in flight is of no use
            raise
        facts = torch.tensor([[len(one.tokens), one.version] for one in completions], dtype=torch.int64).view(-1, 2)
        facts = self._spread(facts, (len(prompts), 2))
        width = int(facts[:, 0].max()) if len(prompts) else 0
        values = torch.zeros(len(completions), 2, width, dtype=torch.float64)  # a token's id is exact in it
        for row, one in enumerate(completions):
            values[row, :, : len(one.tokens)] = torch.tensor([one.tokens, one.logprobs], dtype=torch.float64)
        values = self._spread(values, (len(prompts), 2, width))
        rows = [row[:, :length] for row, length in zip(values, facts[:, 0].tolist(), strict=True)]
        responses, logprobs = [row[0].long().tolist() for row in rows], [row[1].tolist() for row in rows]
        return padded_samples(prompts, responses, logprobs=logprobs, dtype=self._engine.float_dtype), facts[:, 1]

    def update(self, version: int, save: Callable[[], Path]) -> None:
        """Make the servers load the trainer's weights, once all samples in flight are there; every rank calls it.

        Args:
            version: optimizer steps behind the weights.
            save: writes them, on every rank, and names the folder.

        Raises:
            ValueError: a server refused or did not answer, on every rank.
        """
        path = self.config.update_path
        assert path is not None
        self._settle()
        body = {"model_path": str(save().absolute()), "weight_version": str(version)}
        orders = self._server.post_to_all(path, body) if dist.get_rank() == 0 else []
        self._wait(orders)

        def read() -> None:
            for order in orders:
                if order.done() and (error := order.exception()) is not None:
                    raise ValueError(str(error))

        raise_on_all_ranks(read)
        self._version, self.updated = version, True

    def state_dict(self) -> Mapping[str, Tensor]:
        """The samples in flight, once all M have arrived; failed ones are left out, to be requested again."""
        self._settle()
        done = [
            (sample, asked.prompt, _known(asked))
            for sample, asked in sorted(self._asked.items())
            if asked.future.exception() is None
        ]
        facts = [[sample, mark, one.version, one.stopped, len(one.tokens)] for sample, mark, one in done]
        return {
            "facts": torch.tensor(facts, dtype=torch.int64).view(-1, 5),
            "tokens": torch.tensor([token for *_, one in done for token in one.tokens], dtype=torch.int64),
            "logprobs": torch.tensor([x for *_, one in done for x in one.logprobs], dtype=torch.float64),
        }

    def load_state_dict(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Takes up what was in flight on all data ranks; `forget` drops what this one does not want.

        Raises:
            ValueError: parts of another making.
        """
        if not self._asks:
            return
        for part in parts:
            facts, lengths = part["facts"], part["facts"][:, 4].tolist()
            tokens, logprobs = part["tokens"].split(lengths), part["logprobs"].split(lengths)
            for row, ids, scores in zip(facts.tolist(), tokens, logprobs, strict=True):
                sample, prompt, version, stopped, _ = row
                future: Future[Completion] = Future()
                future.set_result(Completion(tuple(ids.tolist()), tuple(scores.tolist()), bool(stopped), version))
                self._asked[sample] = _Asked(prompt, version, future)

    def _settle(self) -> None:
        """Wait until nothing is in flight any more, successful or not; every rank calls it."""
        self._wait([asked.future for asked in self._asked.values()], tolerant=True)

    def _wait(self, futures: Sequence[Future], *, tolerant: bool = False) -> bool:
        """Wait until all are done on every rank, or (but for `tolerant`) one has failed on some: then False on all.

        Ranks look at each other now and then, so that no collective runs into its timeout while a server works.
        """
        until = ALL_COMPLETED if tolerant else FIRST_EXCEPTION
        while True:
            tick("waiting for the server")
            done, left = wait(futures, _LOOK, until)
            failed = not tolerant and any(map(_failed, done))
            state = torch.tensor(_FAILED if failed else _WAITING if left else 0, device=self._engine.device)
            dist.all_reduce(state, dist.ReduceOp.MAX)
            if int(state) != _WAITING:
                return int(state) != _FAILED

    def _spread(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The asking rank's values on all that hold the same data: a sum with zeros."""
        device = torch.device("cpu")
        for group in self._sharing:
            device = communication_device(group, device)
        whole = values.to(device) if self._asks else torch.zeros(shape, dtype=values.dtype, device=device)
        for group in self._sharing:
            if group_size(group) > 1:
                dist.all_reduce(whole, group=group)
        return whole.cpu()


def _failed(future: Future) -> bool:
    return future.done() and future.exception() is not None


def _known(asked: _Asked) -> Completion:
    """The completion with its policy's version: the server's, or else that of the weights last sent."""
    completion = asked.future.result()
    return completion if completion.version is not None else replace(completion, version=asked.version)


def _mark(prompt: Sequence[int]) -> int:
    """A 63-bit hash of the prompt: a checkpoint's samples are useless to a run whose data have changed."""
    digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
