"""Serves the samples of a run or an evaluation as web pages, on this machine only.

    jaxrl browse runs/dapo_tiny/seed0
    jaxrl browse evaluations/Qwen2.5-0.5B-1f3a5c77

The newest step comes first; reload the list to see a new one. Only this machine can open the pages; to view
them from another machine, forward the port (ssh -L 8010:127.0.0.1:8010 HOST). Needs the extra `serve`. Ctrl-C
stops it.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Sequence

from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.tracking.run_folder import EvaluationFolder, RolloutFolder, RunFolder
from jaxrl_serving.serve_config import check_packages, end_of_service

# This machine only: the pages need no key.
_HOST = "127.0.0.1"
_CONNECTIONS = 100


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, which starts with the program's name; returns the exit status."""
    program, *arguments = argv
    parser = command_parser(program, __doc__)
    parser.add_argument("run", type=pathlib.Path, help="folder of a run or an evaluation")
    parser.add_argument(
        "--http_port",
        "--port",
        type=int,
        default=8010,
        help="port; 0 chooses a free one (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    files, port = sample_files(args.run), args.http_port
    check_packages()
    # After the check: both need the extra `serve`.
    from jaxrl_browse.browse_app import build_app
    from jaxrl_serving.http_server import HttpServer

    if not 0 <= port < 2**16:
        raise UserError(f"--http_port {port} is no port; choose one from 0 to 65535")
    app = build_app(files, title=str(args.run))
    server = HttpServer(app, host=_HOST, port=port, max_connections=_CONNECTIONS)
    with contextlib.ExitStack() as stack, end_of_service() as ended:
        stack.callback(server.stop)
        print(f"{args.run}: http://{_HOST}:{server.port}/", flush=True)
        ended.wait()
    return 0


def sample_files(path: pathlib.Path) -> Callable[[], Sequence[pathlib.Path]]:
    """Returns a function that lists the present sample files of a folder, newest first.

    Raises:
      UserError: if the folder is not that of a run or an evaluation.
    """
    if path.is_file() and path.suffix == ".jsonl":
        return lambda: [path]
    run, evaluation = RunFolder(path), EvaluationFolder(path)
    if evaluation.samples.exists():
        return lambda: [evaluation.samples]
    for rollouts in (run.rollouts, RolloutFolder(path)):
        if rollouts.steps() or (rollouts == run.rollouts and run.config.exists()):
            return lambda: list(rollouts.steps().values())[::-1]
    raise UserError(
        f"{path} has no samples; name the folder of a run, such as runs/dapo_tiny/seed0, or of an "
        "evaluation. A run keeps samples of every so many steps (run.rollouts_every)"
    )
