"""Serves the policy of a config as vLLM and SGLang do: python examples/serve_policy.py PORT CONFIG [overrides]

POST /v1/completions takes prompts as token ids and gives token ids with their log-probs; POST /update_weights_from_disk takes
a checkpoint folder of the trainer. It is there to try `rl.server` without a GPU: one request at a time, no cache.

    python examples/serve_policy.py 8000 configs/grpo_arithmetic.yaml --parallel '{}' &
    parallel-rl train configs/grpo_arithmetic.yaml --parallel '{}' --rl.server '{url: "http://127.0.0.1:8000", model: policy,
      batch_size: 16, update_path: /update_weights_from_disk, ahead: 1}' --run.dir runs/grpo_from_server
"""

import json
import sys
import warnings
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from parallel_rl.training.checkpointing.checkpoint import load_weights
from parallel_rl.training.checkpointing.contents import same_weights
from parallel_rl.training.config.load import load_config
from parallel_rl.training.models.engine import Engine, build_engine, start_world
from parallel_rl.training.rollouts.sampler import sample


class Policy:
    """A model, and the version of its weights."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.version = engine, "default"

    def complete(self, body: dict) -> dict:
        """An answer of /v1/completions: prompt i is drawn from seed + i."""
        config = self.engine.config.sampling
        settings = replace(config, max_new_tokens=body["max_tokens"], temperature=body["temperature"])
        seeds = [body["seed"] + index for index in range(len(body["prompt"]))]
        drawn = sample(self.engine, body["prompt"], seeds, 0, settings)
        assert drawn.generation_logprobs is not None
        choices = []
        for index, sampled in enumerate(drawn.token_mask):
            tokens = drawn.input_ids[index, sampled].tolist()
            logprobs = drawn.generation_logprobs[index, sampled].tolist()
            reason = "stop" if tokens[-1] in self.engine.vocabulary.ends else "length"
            choice = {"index": index, "text": "", "token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}
            choices.append({**choice, "finish_reason": reason})
        return {"object": "text_completion", "choices": choices, "metadata": {"weight_version": self.version}}

    def load(self, body: dict) -> dict:
        check = same_weights(self.engine.config, "model_path")
        load_weights(Path(body["model_path"]), self.engine.model, check)
        self.version = body["weight_version"]
        return {"success": True}


def handler(policy: Policy) -> type[BaseHTTPRequestHandler]:
    calls = {"/v1/completions": policy.complete, "/update_weights_from_disk": policy.load}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, found = (200, calls[self.path](body)) if self.path in calls else (404, {"error": self.path})
            except (KeyError, TypeError, ValueError) as error:
                status, found = 400, {"error": f"{type(error).__name__}: {error}"}
            raw = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: object) -> None:
            """One line a request would be too many."""

    return Handler


class Server(HTTPServer):
    """One request at a time, in the thread of the model; the others wait in the queue of the socket."""

    request_queue_size = 128


def main(port: int, arguments: list[str]) -> None:
    warnings.simplefilter("ignore")
    config = load_config(arguments[0], arguments[1:])
    start_world(config)
    policy = Policy(build_engine(config, config.tokenizer.build().vocabulary, config.model.max_positions))
    server = Server(("127.0.0.1", port), handler(policy))
    print(f"serving {arguments[0]} on http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
