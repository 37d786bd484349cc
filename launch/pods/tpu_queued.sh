#!/usr/bin/env bash
# Trains on a Cloud TPU slice that is queued for, and goes on when it is taken back: spot hosts, at a lower price.
#
#   launch/pods/tpu_queued.sh NAME ZONE v5p-256 VERSION configs/dapo_qwen32b.py [--config.X=Y ...]
#
# VERSION is the runtime of the type (cloud.google.com/tpu/docs/runtimes). A spot slice that was taken back cannot be started again, but
# deleted and asked for once more (cloud.google.com/tpu/docs/spot). PREPARE is a command that makes a new host ready: mounts the shared
# file system, and puts the checkout into ~/jaxrl. MODEL=--reserved takes a
# reservation in place of spot hosts. The slice stays when the run ends: delete it.
set -euo pipefail
name=$1 zone=$2 type=$3 version=$4
shift 4
: "${PREPARE:?is the command that makes a new host ready}"
queued() { gcloud compute tpus queued-resources "$1" "$name" --zone "$zone" "${@:2}"; }
for ((start = 1; start <= 20; start++)); do
  queued create --node-id "$name" --accelerator-type "$type" --runtime-version "$version" "${MODEL:---spot}"
  until state=$(queued describe --format 'value(state.state)') && [[ $state == ACTIVE ]]; do
    [[ $state != FAILED ]] || exit 1
    sleep "${POLL_S:-30}"
  done
  status=0
  # A host may be taken back here, too.
  gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "$PREPARE" &&
    "${0%/*}/tpu_vm.sh" "$name" "$zone" "$@" || status=$?
  # 75: stopped, or a host is lost. 255: ssh has lost its host.
  [[ $status == 75 || $status == 255 ]] || break
  queued delete --force --quiet
done
exit "$status"
