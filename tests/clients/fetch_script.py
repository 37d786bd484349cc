"""Fetches a model and rows from a bucket, and prints what has come. Arguments: scheme, bucket."""

import json
import sys

from jaxrl.errors import UserError
from jaxrl_buckets.buckets import Buckets

scheme, bucket = sys.argv[1:]
model = Buckets().model(f"{scheme}://{bucket}/models/qwen")
rows = Buckets().rows(f"{scheme}://{bucket}/data/train.jsonl", ("train",))
faults = []
for address in (f"{scheme}://{bucket}/nothing", f"{scheme}://no-such-bucket/x"):
    try:
        Buckets().check_model(address)
    except UserError as error:
        faults.append(str(error))
sizes = {
    str(path.relative_to(model)): path.stat().st_size for path in model.rglob("*") if path.is_file()
}
again = Buckets().model(f"{scheme}://{bucket}/models/qwen") == model
print(json.dumps({"sizes": sizes, "rows": rows.read_text(), "faults": faults, "again": again}))
