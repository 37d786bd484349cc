#!/usr/bin/env bash
# Trains on a Cloud TPU slice: the same command on all of its hosts.
#
#   launch/pods/tpu_vm.sh NAME ZONE configs/dapo_qwen32b.py [--config.X=Y ...]
#   COMMAND=doctor launch/pods/tpu_vm.sh NAME ZONE ...     # checks the hosts first
#
# The checkout is in ~/jaxrl on every host, installed with pip install -e '.[tpu]'.
set -euo pipefail
name=$1 zone=$2 recipe=$3
shift 3
printf -v settings ' %q' "${COMMAND:-train}" --config "$recipe" --config.hosts.coordinator=auto "$@"
# Without JAX_PLATFORMS JAX trains on the CPU of a host whose chips do not start (jax/_src/xla_bridge.py).
exec gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all \
  --command "cd ~/jaxrl && JAX_PLATFORMS=tpu,cpu python -m jaxrl$settings"
