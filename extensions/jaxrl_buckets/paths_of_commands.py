"""Commands whose paths are in buckets: what they read is fetched first, what they write is sent afterwards.

jaxrl report gs://b/runs/x/seed0 --out s3://b/pages/x.html
jaxrl report <cache>/.../seed0   --out /tmp/.../x.html        then sent
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import fsspec

from jaxrl.errors import UserError
from jaxrl.files import is_bucket
from jaxrl_buckets.buckets import Listing, told
from jaxrl_buckets.stored_runs import read_run

# What of a run each command reads, by the flag that names the run; "" is an argument without one.
_READS = {
    "browse": {"": "rows"},
    "report": {"": "rows"},
    "diff": {"": "rows"},
    "replay": {"": "all"},
    "convert": {"--path": "weights"},
    "evaluate": {"--model": "weights"},
    "serve": {"--model": "weights"},
}
_WRITES = ("--out", "--to")


def with_local_paths(
    name: str, command: Callable[[Sequence[str]], int], argv: Sequence[str]
) -> int:
    """Calls a command with folders of this host in place of addresses in buckets; returns its status.

    Raises:
      UserError: an address cannot be read or written, or an export exists there.
    """
    with tempfile.TemporaryDirectory(prefix="jaxrl_bucket_") as scratch:
        outputs: dict[str, pathlib.Path] = {}

        def local(flag: str, text: str) -> str:
            if not is_bucket(text):
                return text
            if flag in _WRITES:
                # Before minutes of work.
                if _names(text) and name == "convert":
                    raise UserError(f"{text} exists; remove it or name another place")
                outputs[text] = pathlib.Path(scratch, str(len(outputs)), text.split("/")[-1])
                outputs[text].parent.mkdir()
                return str(outputs[text])
            what = _READS.get(name, {}).get(flag)
            # A model may be one of Hugging Face, which the command fetches itself.
            if what is None or (flag == "--model" and "config.txt" not in _names(text)):
                return text
            return str(read_run(text, what))

        arguments, flag = [], ""
        for text in argv:
            key, equals, value = text.partition("=")
            if text.startswith("--"):
                arguments.append(key + equals + local(key, value))
                flag = "" if equals else key
            else:
                arguments.append(local(flag, text))
                flag = ""
        status = command(arguments)
        for url, path in outputs.items():
            _send(path, url)
    return status


def _names(url: str) -> dict[str, Any]:
    with told(url):
        return Listing(url, may_be_empty=True).files


def _send(path: pathlib.Path, url: str) -> None:
    with told(url, "written"):
        system, root = fsspec.core.url_to_fs(url)
        files = [x for x in sorted(path.rglob("*")) if x.is_file()] if path.is_dir() else [path]
        # Small ones last: what is not whole has no config.json.
        for each in sorted(files, key=lambda x: x.suffix == ".json"):
            below = each.relative_to(path).as_posix() if path.is_dir() else ""
            system.put_file(str(each), f"{root}/{below}".rstrip("/"))
    if files:
        print(f"sent to {url}")
