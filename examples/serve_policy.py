"""Serve the policy of a config as vLLM and SGLang do: python examples/serve_policy.py [HOST:]PORT CONFIG [overrides]

Use it to try `rl.server` without a GPU: it serves one request at a time and has no cache. POST /v1/completions takes
prompts as token ids and returns token ids with their log-probs. It takes weights by the endpoints of both engines
(`rl.server.update: vllm` or `sglang`): a Hugging Face folder, loaded during a pause.

    python examples/serve_policy.py 8000 configs/grpo_from_server.yaml &
    parallel-rl train configs/grpo_from_server.yaml
"""

import argparse
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from parallel_rl.megatron import wrap_model
from parallel_rl.megatron.hf import load_hf
from parallel_rl.training.config.load import load_config
from parallel_rl.training.config.sections import DTYPES
from parallel_rl.training.models.engine import Engine, build_engine, start_world
from parallel_rl.training.rollouts.sampler import sample

Answer = tuple[int, object]  # a status, and what becomes JSON


class Policy:
    """A model, the version of its weights, and whether it is paused."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name, self.version, self.paused = engine, name, "default", False
        self.posts: dict[str, Callable[[dict], Answer]] = {
            "/v1/completions": self.complete,
            # vLLM
            "/pause": self.pause,
            "/collective_rpc": lambda body: self.load(body["kwargs"]["weights_path"]),
            "/reset_prefix_cache": self.flush,
            "/update_weight_version": lambda body: self.tell(body["new_version"]),
            "/resume": self.resume,
            # SGLang
            "/pause_generation": self.pause,
            "/update_weights_from_disk": lambda body: self.load(body["model_path"], body["weight_version"]),
            "/flush_cache": self.flush,
            "/continue_generation": self.resume,
        }
        self.gets: dict[str, Callable[[], object]] = {
            "/health": dict,
            "/v1/models": lambda: {"object": "list", "data": [{"id": self.name, "object": "model", "root": None}]},
            "/weight_info": lambda: {"weight_version": self.version},
            "/server_info": lambda: {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}},
            "/model_info": lambda: {"weight_version": self.version, "model_path": None},
        }

    def complete(self, body: dict) -> Answer:
        """An answer of /v1/completions: prompt i is drawn from seed + i; temperature 0 is the likeliest token."""
        if self.paused:
            return 503, {"error": "paused"}
        config = self.engine.config.sampling
        greedy, heat = body["temperature"] == 0, body["temperature"] or config.temperature
        settings = replace(config, max_new_tokens=body["max_tokens"], temperature=heat)
        outside = [token for prompt in body["prompt"] for token in prompt if token >= self.engine.vocab_size]
        if outside:
            return 400, {"error": f"token id {outside[0]} is out of vocabulary"}
        seeds = [body["seed"] + index for index in range(len(body["prompt"]))]
        drawn = sample(self.engine, body["prompt"], seeds, 0, settings, greedy=greedy)
        assert drawn.generation_logprobs is not None
        choices = []
        for index, sampled in enumerate(drawn.token_mask):
            tokens = drawn.input_ids[index, sampled].tolist()
            logprobs = drawn.generation_logprobs[index, sampled].tolist()
            reason = "stop" if tokens[-1] in self.engine.vocabulary.ends else "length"
            choice = {"index": index, "text": "", "token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}
            choices.append({**choice, "finish_reason": reason})
        return 200, {"object": "text_completion", "model": self.name, "choices": choices}

    def pause(self, body: dict) -> Answer:
        self.paused = True
        return 200, {"status": "paused"}

    def load(self, folder: str, version: str | None = None) -> Answer:
        if not self.paused:
            return 400, {"success": False, "message": "weights are loaded between a pause and its end"}
        dtype = DTYPES[self.engine.config.run.dtype]
        [model] = load_hf(Path(folder), dtype=dtype, vocab_multiple=self.engine.config.model.vocab_multiple)
        self.engine = replace(self.engine, model=wrap_model(model))
        return (200, {"success": True}) if version is None else self.tell(version)

    def tell(self, version: str) -> Answer:
        self.version = version
        return 200, {"success": True}

    def flush(self, body: dict) -> Answer:
        return 200, {"success": True}

    def resume(self, body: dict) -> Answer:
        self.paused = False
        return 200, {"status": "resumed"}


def handler(policy: Policy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            self.answer((200, policy.gets[path]()) if path in policy.gets else (404, {"error": path}))

        def do_POST(self) -> None:
            path, body = self.path.partition("?")[0], json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                self.answer(policy.posts[path](body) if path in policy.posts else (404, {"error": path}))
            except (KeyError, TypeError, ValueError) as error:
                self.answer((400, {"error": f"{type(error).__name__}: {error}"}))

        def answer(self, found: Answer) -> None:
            raw = json.dumps(found[1]).encode()
            self.send_response(found[0])
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: object) -> None:
            """One line a request would be too many."""

    return Handler


class Server(HTTPServer):
    """One request at a time, in the thread of the model; the others wait in the queue of the socket."""

    request_queue_size = 128


def main(address: str, arguments: list[str]) -> None:
    warnings.simplefilter("ignore")
    config = load_config(arguments[0], arguments[1:])
    name = None if config.server is None else config.server.model
    start_world(config)
    policy = Policy(
        build_engine(config, config.model.vocabulary(config.tokenizer.build().vocabulary), config.model.max_positions),
        name or "policy",
    )
    host, _, port = address.rpartition(":")
    server = Server((host or "127.0.0.1", int(port)), handler(policy))
    print(f"serving {arguments[0]} on http://{host or '127.0.0.1'}:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", metavar="[HOST:]PORT")
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, help="--section.key value ...")
    given = parser.parse_args()
    main(given.address, [given.config, *given.overrides])
