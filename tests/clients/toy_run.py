"""A run without JAX, whose mirror is the real one: each step's weights are a digest of those before.

Arguments: URL, folder, number of steps; of hosts without a shared disk also their number, which of them this
is, and the number of the lock, which the first one prints. It starts in a moment, so it can be killed often.
"""

import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import time
import zlib

url, folder, steps = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
apart = sys.argv[4:]
hosts, host, _ = map(int, apart or (1, 0, 0))
own = f"weights{host or ''}"
stage = folder / "rl"
folder.mkdir(parents=True, exist_ok=True)
mirror = subprocess.Popen(
    [sys.executable, "-m", "jaxrl_buckets.mirror", url, str(folder), "2", "the toy", *apart],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    start_new_session=True,
)
answer = json.loads(mirror.stdout.readline())
assert "error" not in answer, answer
print(answer["number"], flush=True)
# The newest checkpoint, which the mirror has looked at.
found = [int(path.stem) for path in (stage / "checkpoints.manifests").glob("*.json")]
last = max(found, default=0)
weights = b"%d" % host * 300_000
if last:
    weights = (stage / f"checkpoints/{last}/{own}").read_bytes()
    written = json.loads((stage / f"checkpoints.manifests/{last}.json").read_text())
    assert written[own] == [len(weights), zlib.crc32(weights)]
rows = stage / "metrics.jsonl"
kept = rows.read_bytes().splitlines(keepends=True)[:last] if last else []
assert len(kept) == last, "rows before the checkpoint are missing"
stage.mkdir(exist_ok=True)
(stage / "new").write_bytes(b"".join(kept))
(stage / "new").replace(rows)
for step in range(last + 1, steps + 1):
    weights = hashlib.blake2b(weights).digest() * 4688
    time.sleep(2)
    # The hosts of a run are at the same step.
    (folder.parents[1] / f"at.{answer['number']}.{step}.{host}").touch()
    while len([*folder.parents[1].glob(f"at.{answer['number']}.{step}.*")]) < hosts:
        time.sleep(0.02)
    with rows.open("ab") as file:
        file.write(json.dumps({"step": step, "crc": zlib.crc32(weights)}).encode() + b"\n")
    checkpoint = stage / f"checkpoints/{step}"
    # A run before may have left one that has no manifest.
    shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir(parents=True)
    (checkpoint / own).write_bytes(weights)
    manifest = stage / f"checkpoints.manifests/{step}.json"
    manifest.parent.mkdir(exist_ok=True)
    sums = {own: [len(weights), zlib.crc32(weights)]} | ({"../../hosts": [host]} if apart else {})
    manifest.with_suffix(".new").write_text(json.dumps(sums))
    manifest.with_suffix(".new").replace(manifest)
    for old in range(1, step - 1):
        (stage / f"checkpoints.manifests/{old}.json").unlink(missing_ok=True)
        shutil.rmtree(stage / f"checkpoints/{old}", ignore_errors=True)
mirror.stdin.close()
answer = json.loads(mirror.stdout.readline())
assert not answer["left"], answer
