#!/bin/sh
# One node: as many processes as the configuration's sp * tp * dp.
#
#   launch/one_node.sh configs/wan2.2_t2v_a14b.yaml train.py --steps 10
#   NPROC=16 launch/one_node.sh configs/qwen3_32b.yaml -m my_package.train     # a degree is auto
#
# On NPUs source CANN's set_env.sh first. ASCEND_RT_VISIBLE_DEVICES=0,1,2,3 (ascending, no spaces)
# or CUDA_VISIBLE_DEVICES chooses devices.
set -eu
config=$1
shift
exec "${PYTHON:-python}" -m ulysses.launch launch --config "$config" \
    ${NPROC:+--nproc "$NPROC"} "$@"
