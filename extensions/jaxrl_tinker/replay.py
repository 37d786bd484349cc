"""Goes on with the log of an earlier server: its sessions, results, snapshots, and what was not finished.

sessions, samplers of named weights     are made again
finished submissions                    keep their results; those that a model's state or a kept snapshot
                                        depends on are repeated, from the last checkpoints on
others                                  are submitted again
"""

from __future__ import annotations

import collections
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence

from jaxrl.errors import UserError
from jaxrl_serving.openai.protocol import ApiError
from jaxrl_tinker.clients import MAX_SNAPSHOTS, Clients
from jaxrl_tinker.futures import Future, Futures, Gone, Result
from jaxrl_tinker.log import Record
from jaxrl_tinker.models import CannotRedo, Done, Models


def replay(
    records: Sequence[Record],
    clients: Clients,
    futures: Futures,
    models: Models,
    submit: Callable[[str, bytes], None],
) -> None:
    """Brings a server to the state that a log tells; it returns before what was pending is finished.

    Args:
      records: the log.
      clients, futures, models: parts of the server, as they start.
      submit: function that handles the body of a route as if it came now.

    Raises:
      UserError: a call that succeeded fails this time.
    """

    def again(call: Record, *, handled: bool) -> None:
        refused: Exception = UserError(
            "the server was started again and does not know this request"
        )
        if handled:
            try:
                submit(call["route"], call["body"])
            except CannotRedo as error:
                raise UserError(
                    f"the log of this folder cannot be gone on with ({error}); mend what it says, or move "
                    "log.jsonl away to begin anew"
                ) from error
            except (ApiError, Gone, UserError) as error:
                refused = UserError(str(error))

        # Called only if the route above has submitted nothing; else its future is found and returned.
        def refuse(future: Future) -> None:
            if future.result is None:
                raise refused

        names = {"session_id": call["session"], "channel": call["channel"]}
        futures.submit(call["route"], call["id"], call["body"], refuse, **names)

    def of(kind: str) -> list[Record]:
        return [record for record in records if record["kind"] == kind]

    sessions = [record["session"] for record in of("session")]
    for session_id in sessions:
        clients.restore(session_id)
    for record in of("sampler"):
        # Its weights may have been removed.
        with contextlib.suppress(Gone, UserError):
            submit("create_sampling_session", record["body"])
    # The first of each id counts: a result that made room for others may have been asked for again.
    calls: dict[str, Record] = {}
    results: dict[str, Record] = {}
    for kind, known in (("call", calls), ("result", results)):
        for record in of(kind):
            known.setdefault(record["id"], record)
    ran = [
        # A request id is MODEL/SEQ_ID, or that of the model itself where it began.
        Done(request_id, calls[request_id]["route"], result["failed"], request_id.partition("/")[0])
        for request_id, result in results.items()
        if result["ran"]
    ]
    held = _held_saves(ran, calls)
    checkpoints, replaced = (
        [record["id"] for record in of(kind)] for kind in ("checkpoint", "replaced")
    )
    models.expect(ran, checkpoints, held, replaced)
    for request_id, result in results.items():
        found = Result(result["body"], result["is_protobuf"], result["failed"])
        futures.expect(request_id, found)
        again(calls[request_id], handled=result["ran"])
    # Only now: replaced models came again for snapshots that others still sample from.
    models.drop_replaced()
    for request_id in calls.keys() - results.keys():
        futures.expect(request_id, None)
    for request_id, call in calls.items():
        if request_id not in results:
            again(call, handled=True)
    # The routes have marked the sessions as heard of, but no client has said a word yet.
    for session_id in sessions:
        clients.restore(session_id)


def _held_saves(ran: Sequence[Done], calls: Mapping[str, Record]) -> list[str]:
    """The calls that took the snapshots that samplers still have, as many as `Clients.add_sampler` keeps."""
    snapshots: dict[str, list[str]] = collections.defaultdict(list)
    newest: dict[str, str] = {}
    for call in ran:
        if call.route != "save_weights_for_sampler" or call.failed:
            continue
        body = json.loads(calls[call.request_id]["body"])
        if body.get("kind") == "inflight":
            newest[call.model_id] = call.request_id
        elif not body.get("path"):
            snapshots[calls[call.request_id]["session"]].append(call.request_id)
    held = [each for taken in snapshots.values() for each in taken[-MAX_SNAPSHOTS:]]
    return [*held, *newest.values()]
