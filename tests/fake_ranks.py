"""This process as any rank of a world of which there is no other: groups can be made, and nothing can be sent."""

from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def being(rank, world):
    """Within it this process is ``rank`` of ``world``."""
    options = FakeProcessGroup.Options()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world, pg_options=options)
    try:
        yield
    finally:
        dist.destroy_process_group()
