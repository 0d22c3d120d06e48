"""A client of several processes: the GPUs of one node train as one worker (Linux only).

The process that answers Flower's messages is rank 0. It owns the message and the state file, and
starts the other ranks, which end with it. Each rank takes its rows of the same batch, and gradients
are summed over all ranks before they are clipped, so the reply is the one that a single process
would have sent, up to rounding.

``ddp`` keeps model and optimizer whole in every process, ``fsdp`` a shard in each
(``rank_worker``). Nothing is pickled: rank 0 sends calls as JSON through the process group's store,
and tensors through ``torch.distributed``, on loopback.

Import single modules: a client of one process needs only ``parallelism``.
"""
