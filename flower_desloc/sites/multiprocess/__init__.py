"""A client of several processes: the GPUs of one node as one worker.

The process that answers Flower's messages is rank 0. It owns the message and the state file, and
starts the others, which live as long as it does. Each takes its rows of the same batch, and
gradients are summed over all, before anything is clipped: what leaves the group is what one process
would have sent, up to rounding.

Two ways for the model to lie in the processes: ``ddp``, whole in each
(:mod:`flower_desloc.sites.multiprocess.whole`), and ``fsdp``, a share in each
(:mod:`flower_desloc.sites.multiprocess.sharded`). Nothing is pickled: commands are lines of JSON
from rank 0 to a process that it started, tensors go through ``torch.distributed`` on loopback.

Import single modules: a client of one process needs only ``settings``.
"""
