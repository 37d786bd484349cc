"""Settings of a server and its engine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import ipaddress
import os
import pathlib
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

from jaxrl.checks import NAME, PATH, at_least, between, count, settings, token_count
from jaxrl.errors import UserError
from jaxrl.flags import add_flags, command_parser, settings_of
from jaxrl.rollout.settings import EngineSettings


@settings
class ServeConfig(EngineSettings):
    """Settings of a server and its engine; `EngineSettings` documents the inherited ones."""

    model: Annotated[str, PATH]
    """Hugging Face directory of the model."""
    name: str = ""
    """Model name that requests must use; "" means the directory's name."""
    chat_template: Annotated[str, PATH] = ""
    """File with the chat template; "" is the model's own."""
    host: Annotated[str, NAME] = "127.0.0.1"
    """Address to listen on; "" is every address of this machine."""
    api_key: Annotated[str, NAME] = ""
    """Key that requests must send as `Authorization: Bearer KEY`. "" takes it from the variable
    JAXRL_API_KEY, which the list of processes does not show. Addresses other than localhost
    need one.
    """
    http_port: Annotated[int, between(0, 65_535)] = 8000
    """Port to listen on; 0 chooses a free port."""
    slots: Annotated[int, count(1)] = 64
    """Maximum number of samples decoded at the same time."""
    prefill_prompts: Annotated[int, count(1)] = 8
    """Number of prompts per prefill."""
    # The activations of a long prompt may not fit if it is prefilled at once.
    prefill_chunk_tokens: Annotated[int, token_count(0)] = 2048
    max_prompt_tokens: Annotated[int, token_count(0)] = 0
    max_response_tokens: Annotated[int, token_count(0)] = 0
    """Maximum lengths of prompt and response; 0 uses all that the model's context and the
    memory of the devices allow.
    """
    tokens_per_dispatch: Annotated[int, between(1, 65_536)] = 8
    """Number of tokens decoded between two pieces of streamed text."""
    mesh: str = "1-1-1"
    """Mesh of the devices as "p-t-d"; it uses the first devices of this machine."""
    # Adds "auto" to the engine's type. It is resolved once the devices are known.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # pyright: ignore
    """Data type of weights and activations. "auto" is bfloat16 on accelerators and float32 on
    CPUs, which are slower in bfloat16.
    """
    max_waiting: Annotated[int, count(1)] = 10_000
    """Maximum number of samples that wait for a slot; more are refused."""
    max_body_bytes: Annotated[int, at_least(1, at_most=2**31)] = 1 << 20
    """Maximum size of a request in bytes."""
    max_connections: Annotated[int, count(1)] = 1000
    """Maximum number of open HTTP connections; while there are more, requests are refused."""
    grace_s: Annotated[float, between(0, 86_400)] = 10.0
    """Seconds that open requests may continue after SIGTERM."""

    def __post_init__(self):
        super().__post_init__()
        try:
            found = socket.getaddrinfo(self.host or "0.0.0.0", None)
            # All of its addresses: a name may have several. `ip_address` takes no scope of an IPv6 address.
            hosts = [ipaddress.ip_address(str(at[0]).partition("%")[0]) for *_, at in found]
            is_local = all(host.is_loopback for host in hosts)
        except OSError:
            is_local = False
        if not (is_local or self.key):
            raise UserError(needs_key(self.host))

    @property
    def model_name(self) -> str:
        return self.name or pathlib.Path(self.model).resolve().name

    @property
    def key(self) -> str:
        """The key that requests must send; "" if they need none."""
        return self.api_key or os.environ.get("JAXRL_API_KEY", "").strip()


Config = TypeVar("Config", bound=ServeConfig)


def read_flags(argv: Sequence[str], description: str | None, kind: type[Config]) -> Config:
    """The settings on a command line, program name first.

    Raises:
      UserError: they are wrong.
    """
    program, *arguments = argv
    parser = command_parser(program, description)
    # No supervisor starts a server with fewer hosts.
    of_supervisor = {"fewer", "fewer_after_s"}
    add_flags(parser, kind, only={f.name for f in dataclasses.fields(kind)} - of_supervisor)
    # `--tinker` is read by the caller, and `--port` must not have a default of its own.
    absent: Any = {"default": argparse.SUPPRESS}
    parser.add_argument("--tinker", action="store_true", help="serve the Tinker API", **absent)
    parser.add_argument(
        "--port", dest="http_port", type=int, help="short for --http_port", **absent
    )
    try:
        return settings_of(kind, parser.parse_args(arguments))
    except ValueError as error:
        raise UserError(str(error)) from error


def check_packages(**others: str) -> None:
    """Looks for the packages of the extra `serve`, and for others, given with the names of their modules.

    Raises:
      UserError: some are not installed.
    """
    modules = {name: name for name in ("httptools", "starlette", "uvicorn")} | others
    if absent := [name for name, module in modules.items() if not importlib.util.find_spec(module)]:
        raise UserError(f"{', '.join(absent)} not installed; pip install {' '.join(absent)}")


@contextlib.contextmanager
def end_of_service() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set inside a `with` block."""
    ended = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: ended.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield ended
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def needs_key(host: str) -> str:
    """The message for an address that others can reach and a server without a key."""
    return (
        f"--host {host or '0.0.0.0'} can be reached from other machines; set a key in the variable "
        "JAXRL_API_KEY or by --api_key, or leave --host out and listen on this machine only"
    )
