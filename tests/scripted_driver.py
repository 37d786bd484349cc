"""A driver of the HTTP endpoint whose model says what it is told to, a few tokens at a time."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from jaxrl.data.tokenizer import TextStream, Tokenizer
from jaxrl.rollout.live_loop import LiveCounts
from jaxrl.rollout.settings import EngineConfig
from jaxrl_agents.conversation import ChatModel, Conversation
from jaxrl_agents.session_prompts import SessionPrompts
from jaxrl_agents.sessions import Session, Sessions
from jaxrl_serving.http_server import HttpServer
from jaxrl_serving.online_driver import Delta
from jaxrl_serving.openai.endpoint import build_app


def sizes_of(prompt: int, response: int, context: int, stop_ids=()) -> EngineConfig:
    """An engine's sizes as far as requests know them: maximum numbers of tokens, and stop ids."""
    lengths = {"max_prompt_tokens": prompt, "max_response_tokens": response}
    return EngineConfig(**lengths, context_tokens=context, stop_ids=stop_ids)


class ScriptedDriver:
    """Answers at once.

    Attributes:
      prompts: prompts of all requests so far, int32 [T] each.
    """

    alive, load, max_waiting = True, (0, 0), 10_000
    counts = LiveCounts(*[0] * 7)

    def __init__(self, tokenizer: Tokenizer, say: Callable[[np.ndarray], np.ndarray]):
        self._tokenizer, self._say = tokenizer, say
        self.prompts: list[np.ndarray] = []

    def submit_all(self, requests, texts=True, shows_stop=False):
        for request, listener in requests:
            self.prompts.append(request.prompt)
            for index in range(request.options.num_samples):
                self._answer(request, listener, index)
        return range(len(requests))

    def cancel(self, ticket):
        pass

    def _answer(self, request, listener, index):
        stop = request.options.stop_strings
        tokens = np.array(self._say(request.prompt), np.int32)[: request.max_tokens]
        stream = TextStream(self._tokenizer.decode, stop)
        at_stop_string = any(text in self._tokenizer.decode(tokens) for text in stop)
        for first in range(0, len(tokens), 3):
            part = tokens[first : first + 3]
            finish = ""
            pieces, text = stream.add(part.tolist())
            if first + 3 >= len(tokens):
                stopped = at_stop_string or tokens[-1] in self._tokenizer.stop_ids
                finish = "stop" if stopped else "length"
                text += stream.end(at_stop_string=at_stop_string)
            logprob = -np.arange(first, first + len(part), dtype=np.float32) / 8
            listener(Delta(part, logprob, -logprob, 0, index, pieces, text, finish))


@contextlib.contextmanager
def serving(
    driver: ScriptedDriver, tokenizer: Tokenizer, *, model: str = "m", **settings
) -> Iterator[str]:
    """Runs the endpoint of a model with a context of 2000 tokens; gives its address."""
    sizes = sizes_of(1900, 1000, 2000, tokenizer.stop_ids)
    app = build_app(driver, tokenizer, model, sizes, max_body_bytes=100_000, **settings)  # pyright: ignore
    server = HttpServer(app, host="127.0.0.1", port=0)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.stop()


@contextlib.contextmanager
def serving_sessions(
    tokenizer: Tokenizer,
    say: Callable[[np.ndarray], np.ndarray],
    count: int = 1,
    *,
    most_turns: int,
    model: str = "m",
) -> Iterator[tuple[str, list[Session], Sessions]]:
    """Runs the endpoint of agents; gives its address, some open sessions, and the object that has them."""
    chat, sessions = ChatModel(tokenizer), Sessions(600.0)
    opened = [Session(0, n, 7, {}, {"": Conversation(chat)}) for n in range(count)]
    sessions.open(opened)
    prompts = SessionPrompts(chat, sessions, most_turns=most_turns)
    driver = ScriptedDriver(tokenizer, say)
    with serving(driver, tokenizer, model=model, prompts=prompts) as url:
        yield url, opened, sessions
