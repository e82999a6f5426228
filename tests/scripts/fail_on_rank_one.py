"""Launched by test_launch: rank 1 raises while the other ranks wait for it in a collective."""

import dataclasses
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

import ulysses
from ulysses.launch import current_degrees

assert sys.argv[1:] == ["an", "argument"]
mesh = ulysses.init_mesh(**dataclasses.asdict(current_degrees()), device_type="cpu")
group = mesh["sp"].get_group()
print(f"process {os.getpid()}", flush=True)
dist.all_reduce(torch.ones(1), group=group)

if dist.get_rank() == 1:
    # Alone, a thread that has not ended would keep the process, and its connections, alive.
    threading.Thread(target=time.sleep, args=(60,)).start()
    print(f"raised at {time.time()}", flush=True)
    # The others are inside the collective by now or soon.
    raise LookupError("only this rank can see it")
dist.all_reduce(torch.ones(1), group=group)
