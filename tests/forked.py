"""Starts ranks as processes that share one import of torch and transformers, which takes longer than many a test."""

import multiprocessing

import torch.multiprocessing as mp

PRELOADED = ["paceline.rl.parallel.drafting", "transformers.models.llama.modeling_llama"]


def start(main, arguments, ranks):
    """``main(rank, *arguments)`` by each of ``ranks`` processes; returns when all have ended, raises what one does.

    They are forked from a process that has imported and computed nothing, not from this one, whose threads they lack.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(main, arguments, nprocs=ranks, start_method="forkserver")
