"""Launched by npu/test_launch: says what each rank's mesh stands on."""

import dataclasses
import os

import torch
import torch.distributed as dist

import ulysses
from ulysses.launch import current_degrees

mesh = ulysses.init_mesh(**dataclasses.asdict(current_degrees()))
total = torch.full((1,), float(mesh["sp"].get_local_rank() + 1), device=mesh.device_type)
dist.all_reduce(total, group=mesh["sp"].get_group())
# One write: unbuffered, print would write its line and its end apart, and ranks share the pipe.
os.write(
    1,
    f"rank {dist.get_rank()}: {mesh.device_type}:{torch.npu.current_device()} "
    f"{dist.get_backend()} sum {float(total)} "
    f"timeout {os.environ['HCCL_CONNECT_TIMEOUT']}\n".encode(),
)
