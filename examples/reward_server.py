"""A reward over HTTP, with the standard library only: start it on the judge's machine.

    python examples/reward_server.py --port 8000

POST /score with {"prompts": [...], "completions": [...]} answers {"rewards": [...]}. Replace `score` with your model.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def score(prompt: str, completion: str) -> float:
    """The fraction of a completion that consists of words."""
    return sum(c.isalpha() or c == " " for c in completion) / max(1, len(completion))


class RewardHandler(BaseHTTPRequestHandler):
    """Answers one batch; each request has a thread of its own."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Score a batch, or reply with what is wrong with it."""
        try:
            batch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            pairs = zip(batch["prompts"], batch["completions"], strict=True)
            self.answer(200, {"rewards": [score(prompt, completion) for prompt, completion in pairs]})
        except (KeyError, TypeError, ValueError) as error:
            self.answer(400, {"error": f"{type(error).__name__}: {error}"})

    def answer(self, status: int, content: object) -> None:
        """Send JSON."""
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing per request."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 accepts requests from other machines")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    print(f"rewards at http://{asked.host}:{asked.port}/score", flush=True)
    ThreadingHTTPServer((asked.host, asked.port), RewardHandler).serve_forever()
