"""Commands for the devices: one at a time, and with several processes the same ones in each of them.

    process 0   models ---+                                the others
                sampler --+--> run(command, ..) -- sends --> follow: command(..)

Programs of several devices wait for each other on the way. Two threads that start such programs may start
them in another order on each device, and then all of them wait forever. So commands take turns, in the order
in which they come. On one device they may be at work at the same time.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax

from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.tinker.devices import Devices

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Together:
    """Runs the commands of the first process everywhere."""

    def __init__(self, devices: Devices, *, exclusive: bool):
        """Args: what the commands are methods of; whether only one may run at a time."""
        self.devices = devices
        self._exclusive = exclusive
        self._changed = threading.Condition()
        self._arrived = self._served = 0

    def run(
        self,
        command: Callable[Concatenate[Devices, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Runs a method of the devices in every process, and returns what it returns here.

        Its arguments can be pickled, and are right: what a client has done wrong is found before.
        """
        with self._turn():
            self._exchange((command.__name__, args, kwargs))
            return getattr(self.devices, command.__name__)(*args, **kwargs)

    def follow(self) -> None:
        """Runs the commands of the first process in another one, until the first one ends."""
        while (sent := self._exchange()) is not None:
            command, args, kwargs = sent
            # It fails in the first process, too, which tells the client.
            with contextlib.suppress(UserError, jax.errors.JaxRuntimeError):
                getattr(self.devices, command)(*args, **kwargs)

    def end(self) -> None:
        """Ends the other processes."""
        with self._turn():
            self._exchange()

    def _exchange(self, command: Any = None) -> Any:
        if hosts.num_processes() == 1:
            return command
        sent = hosts.on_first(lambda: base64.b64encode(pickle.dumps(command)).decode())
        return pickle.loads(base64.b64decode(sent))

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        # A lock would let a thread that asks again at once go before those that wait.
        with self._changed:
            mine, self._arrived = self._arrived, self._arrived + 1
            self._changed.wait_for(lambda: not self._exclusive or self._served == mine)
        try:
            yield
        finally:
            with self._changed:
                self._served += 1
                self._changed.notify_all()
