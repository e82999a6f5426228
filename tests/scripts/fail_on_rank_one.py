"""Launched by test_launch: rank 1 raises while the other ranks wait for it in a collective."""

import dataclasses
import time

import torch
import torch.distributed as dist

import ulysses
from ulysses.launch import current_degrees

mesh = ulysses.init_mesh(**dataclasses.asdict(current_degrees()), device_type="cpu")
dist.all_reduce(torch.ones(1), group=mesh["sp"].get_group())
if mesh["sp"].get_local_rank() == 1:
    print(f"raised at {time.time()}", flush=True)
    raise LookupError("only this rank can see it")
dist.all_reduce(torch.ones(1), group=mesh["sp"].get_group())
