"""Completions from servers: one process per data rank requests and broadcasts; requests survive a restart."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_rl.agreement import Unavailable, on_first_rank, raise_on_all_ranks
from parallel_rl.experience.samples import Samples, padded_samples
from parallel_rl.servers.completion_server import CompletionServer, Sampling
from parallel_rl.servers.completions import Completion
from parallel_rl.servers.weights import ServerWeights
from parallel_rl.training.config.sections import ServerConfig
from parallel_rl.training.models.engine import Engine
from parallel_rl.training.rollouts.sharing import Sharing, raise_first, write_policy

_RESTARTS = 3  # of servers, during one draw


@dataclass(frozen=True)
class _Request:
    """A request for one sample: its prompt, the server's policy, and whether the server kept that policy."""

    prompt: int
    version: int
    future: Future[Completion]
    sure: bool = False


class Taken(NamedTuple):
    """N samples, their policy versions [N], servers' places in `urls` [N] (−1: unknown), the first fault."""

    samples: Samples
    versions: Tensor
    servers: Tensor
    fault: str | None


class RemoteRollouts:
    """This data rank's source of completions.

    A requested sample stays until taken; checkpoints keep it (`state_dict`), so that a resumed run trains on the same
    samples. With `config.update` the servers receive the trainer's weights. A restarted server is resent the weights;
    its samples since then are redrawn. `compared`: the servers' log-probs were compared with the policy's in this
    process.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        run, sampling = engine.config.run, engine.config.sampling
        self.config, self._engine = config, engine
        self._sharing = Sharing(engine)
        self._sampling = Sampling(
            sampling.max_new_tokens,
            tuple(sorted(engine.vocabulary.ends)),
            engine.vocab_size,
            sampling.temperature,
            2 * run.seed,
            sampling.top_k,
            sampling.top_p,
            redraws=0 if engine.config.rl is None else engine.config.rl.failed_samples.retries,
        )
        self._server = CompletionServer(config, self._sampling)
        self._weights = None if config.update is None else ServerWeights(config, config.update)
        self.compared = False
        self._requests: dict[int, _Request] = {}
        self._ended = False  # a server failed, or a stop was requested while one is away
        self._version = 0  # of the last weights sent
        self._folder: Path | None = None  # last sent by this process; servers may have restarted with it

    @property
    def updated(self) -> bool:
        """Return whether this process has sent weights."""
        return self._folder is not None

    def request(self, prompts: Sequence[Sequence[int]], sample_ids: Sequence[int]) -> None:
        """Request new prompts' samples without waiting; no collective."""
        if not self._sharing.asks:
            return
        known = (self._requests.get(sample) for sample in sample_ids)
        missing = [
            (sample, prompt)
            for sample, prompt, request in zip(sample_ids, prompts, known, strict=True)
            if request is None or request.prompt != _mark(prompt)
        ]
        new = self._ask([prompt for _, prompt in missing], [sample for sample, _ in missing], self._sampling)
        self._requests |= {sample: request for (sample, _), request in zip(missing, new, strict=True)}

    def forget(self, wanted: Collection[int]) -> None:
        """Drop requests that are not among `wanted`, after a change of layout."""
        self._requests = {sample: request for sample, request in self._requests.items() if sample in wanted}

    def take(self, prompts: Sequence[Sequence[int]], sample_ids: Sequence[int]) -> Taken:
        """Take a completion for each of N ≥ 0 prompts, alike on data replicas; every rank calls it.

        ValueError on all ranks if a server failed or used other weights than sent.
        """

        def ask() -> list[_Request]:
            self.request(prompts, sample_ids)
            return [self._requests[sample] for sample in sample_ids]

        with self._ending():
            drawn = self._draw(prompts, ask)
        for sample in sample_ids:
            self._requests.pop(sample, None)
        return drawn

    def draw(
        self, prompts: Sequence[Sequence[int]], sample_ids: Sequence[int], seed: int, *, greedy: bool = False
    ) -> Taken:
        """Draw completions for evaluation, sampled or greedy; same contract as `take`."""
        seeded = replace(self._sampling, seed=seed)
        sampling = replace(seeded, temperature=0.0, top_k=None, top_p=None) if greedy else seeded
        with self._ending():
            return self._draw(prompts, lambda: self._ask(prompts, sample_ids, sampling))

    def bring(self, version: int) -> None:
        """Send the weights of `version` if updates are on, after samples in flight; every rank calls it.

        ValueError on every rank: the weights could not be written; a server refused, did not answer or has another version.
        """
        if self._weights is None or (self.updated and self._version == version):
            return
        with self._ending():
            self._settle()
            folder = write_policy(self._engine, version)
            self._sharing.finish(self._weights.update(folder, version) if dist.get_rank() == 0 else [])
        self._version, self._folder = version, folder

    def state_dict(self) -> Mapping[str, Tensor]:
        """Wait for the samples in flight and return those that did not fail; failed ones are requested again.

        If a stop was requested while a server is away, open ones are left out, too.
        """
        try:
            self._settle()
        except Unavailable:
            if self.updated:
                self._drop()
        done = [
            (sample, request.prompt, _known(request))
            for sample, request in sorted(self._requests.items())
            if request.future.done() and request.future.exception() is None and request.future.result().fault is None
        ]
        facts = [[sample, mark, drawn.version, drawn.stopped, len(drawn.tokens)] for sample, mark, drawn in done]
        return {
            "facts": torch.tensor(facts, dtype=torch.int64).view(-1, 5),
            "tokens": torch.tensor([token for *_, drawn in done for token in drawn.tokens], dtype=torch.int64),
            "logprobs": torch.tensor([x for *_, drawn in done for x in drawn.logprobs], dtype=torch.float64),
        }

    def load_state_dict(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Load all data ranks' samples in flight; `forget` drops others' samples. ValueError if malformed."""
        if not self._sharing.asks:
            return
        for part in parts:
            facts, lengths = part["facts"], part["facts"][:, 4].tolist()
            tokens, logprobs = part["tokens"].split(lengths), part["logprobs"].split(lengths)
            for row, ids, scores in zip(facts.tolist(), tokens, logprobs, strict=True):
                sample, prompt, version, stopped, _ = row
                future: Future[Completion] = Future()
                future.set_result(Completion(tuple(ids.tolist()), tuple(scores.tolist()), bool(stopped), version))
                self._requests[sample] = _Request(prompt, version, future, sure=True)

    def _ask(self, prompts: Sequence[Sequence[int]], sample_ids: Sequence[int], sampling: Sampling) -> list[_Request]:
        futures = self._server.submit(prompts, sample_ids, sampling)
        return [_Request(_mark(prompt), self._version, future) for prompt, future in zip(prompts, futures, strict=True)]

    def _draw(self, prompts: Sequence[Sequence[int]], ask: Callable[[], list[_Request]]) -> Taken:
        """Draw the samples of `ask` on all data replicas; request again if a server lost its weights."""
        for _ in range(_RESTARTS):
            requests = ask() if self._sharing.asks else []
            completions = self._await(requests)
            if not (lost := self._lost()):
                break
            self._resend(lost)
        else:
            raise ValueError(
                f"the completion servers {', '.join(lost)} lost the trainer's weights {_RESTARTS} times while sampling "
                "the same prompts: something other than rl.server.update restarts them or loads weights. Find and stop it"
            )
        raise_on_all_ranks(lambda: self._check_versions(requests, completions), self._all_groups)
        local = [[len(completion.tokens), completion.version, self._place(completion)] for completion in completions]
        facts = self._sharing.spread(torch.tensor(local, dtype=torch.int64).view(-1, 3), (len(prompts), 3))
        width = int(facts[:, 0].max()) if len(prompts) else 0
        values = torch.zeros(len(completions), 2, width, dtype=torch.float64)  # a token's id is exact in float64
        for row, completion in enumerate(completions):
            values[row, :, : len(completion.tokens)] = torch.tensor(
                [completion.tokens, completion.logprobs], dtype=torch.float64
            )
        values = self._sharing.spread(values, (len(prompts), 2, width))
        rows = [row[:, :length] for row, length in zip(values, facts[:, 0].tolist(), strict=True)]
        responses, logprobs = [row[0].long().tolist() for row in rows], [row[1].tolist() for row in rows]
        samples = padded_samples(prompts, responses, logprobs=logprobs, dtype=self._engine.float_dtype)
        fault = next(filter(None, (completion.fault for completion in completions)), None)
        return Taken(samples, facts[:, 1], facts[:, 2], fault)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Request nothing more if the block fails, as it then does on all ranks."""
        try:
            yield
        except (ValueError, Unavailable):
            self._ended = True
            self._server.close()
            raise

    def _await(self, requests: Sequence[_Request]) -> list[Completion]:
        """Wait for this rank's completions on all ranks; ValueError on every rank if one failed."""
        well = self._sharing.wait([request.future for request in requests])

        def read() -> list[Completion]:
            raise_first([request.future for request in requests])
            return [_known(request) for request in requests] if well else []

        completions = raise_on_all_ranks(read, self._all_groups)
        if not well:
            raise ValueError("a completion request of another rank failed; see its error")
        return completions

    def _check_versions(self, requests: Sequence[_Request], completions: Sequence[Completion]) -> None:
        """Refuse samples of a version other than the server acknowledged."""
        if self._weights is None:
            return
        for request, completion in zip(requests, completions, strict=True):
            if completion.version != request.version:
                raise ValueError(
                    f"completion server {completion.url or ', '.join(self.config.urls)}: a sample is of version "
                    f"{completion.version}, although the server acknowledged version {request.version}; name each server by "
                    "its own URL"
                )

    def _place(self, completion: Completion) -> int:
        return self.config.urls.index(completion.url) if completion.url in self.config.urls else -1

    @property
    def _all_groups(self) -> list[ProcessGroup | None]:
        return [*self._sharing.groups, self._engine.groups.data]

    def _settle(self) -> None:
        """Wait for all requests in flight, and drop samples of lost weights; every rank calls it."""
        futures = [request.future for request in self._requests.values()]
        self._sharing.wait(futures, tolerant=True, stoppable=not self._ended)
        if (self._ended and self.updated) or self._lost():
            self._drop()

    def _lost(self) -> list[str]:
        """List the servers whose weights are not those last sent; if empty, all samples are valid."""
        if self._weights is None or not self.updated or self._ended:
            return []
        versions = self._weights.versions() if dist.get_rank() == 0 else []
        self._sharing.finish(versions)
        wanted, urls = str(self._version), self.config.urls

        def compare() -> list[str]:
            return [url for url, version in zip(urls, versions, strict=True) if version.result() != wanted]

        lost = on_first_rank(compare, "the versions of the servers' weights")
        if not lost:
            self._requests = {
                sample: replace(request, sure=request.future.done()) if not request.sure else request
                for sample, request in self._requests.items()
            }
        return lost

    def _resend(self, lost: Sequence[str]) -> None:
        """Resend the last weights and discard samples drawn since."""
        assert self._weights is not None and self._folder is not None
        self._drop()
        first = dist.get_rank() == 0
        if first:
            print(f"{', '.join(lost)} lost the weights of version {self._version}; sending them again", flush=True)
        self._sharing.finish(self._weights.update(self._folder, self._version, lost) if first else [])

    def _drop(self) -> None:
        self._requests = {sample: request for sample, request in self._requests.items() if request.sure}


def _known(request: _Request) -> Completion:
    """Set the completion's policy version: the server's, else that of the weights last sent."""
    completion = request.future.result()
    return completion if completion.version is not None else replace(completion, version=request.version)


def _mark(prompt: Sequence[int]) -> int:
    """Hash the prompt to 63 bits, to recognise a checkpoint's samples after a change of data."""
    digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
