#!/bin/sh
# Several nodes: run the same line on each; they meet at RENDEZVOUS, a port of one of them.
#
#   NNODES=2 RENDEZVOUS=node0:29500 launch/several_nodes.sh configs/qwen3_32b.yaml train.py
#
# NPROC      processes a node, needed where a degree is auto
# NODE_RANK  0 .. NNODES-1, to say which node holds which ranks; RENDEZVOUS is then a port of node 0
# JOB        a name, where two jobs meet at the same place
#
# The ranks of a node are neighbours, so tp, and sp if it fits, stay inside one.
# Where nodes have more than one network, say which to use on each node:
#   export GLOO_SOCKET_IFNAME=eth0 HCCL_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
# Two jobs with NPUs on one node need HCCL_IF_BASE_PORT values at least 32 apart.
# The launcher of a node that fails ends that node's processes. Over gloo and NCCL the others learn
# of it from their connections; HCCL waits for HCCL_EXEC_TIMEOUT (1836 s by default), so lower it.
set -eu
config=$1
shift
exec "${PYTHON:-python}" -m ulysses.launch launch --config "$config" \
    --nnodes "$NNODES" --rdzv-endpoint "$RENDEZVOUS" \
    ${NODE_RANK:+--node-rank "$NODE_RANK"} ${NPROC:+--nproc "$NPROC"} ${JOB:+--rdzv-id "$JOB"} "$@"
