#!/usr/bin/env bash
# Trains on a Cloud TPU slice: the same command on all of its hosts.
#
#   launch/pods/tpu_vm.sh NAME ZONE configs/dapo_qwen32b.py [--config.X=Y ...]
#
# The checkout is in ~/jaxrl on every host, installed with pip install -e '.[tpu]'.
set -euo pipefail
name=$1 zone=$2 recipe=$3
shift 3
printf -v settings ' %q' --config "$recipe" --config.hosts.coordinator=auto "$@"
exec gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all \
  --command "cd ~/jaxrl && python launch/train.py$settings"
