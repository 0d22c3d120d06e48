"""FedProx's proximal term, which keeps a client near the parameters that it starts from."""

from dataclasses import replace

import torch
from torch import Tensor

from flower_desloc.core.streams import trained
from flower_desloc.core.worker import Worker


def proximal(worker: Worker, mu: float) -> Worker:
    """Return a worker with the loss F(x) + mu/2 |x - x_0|^2, where x_0 are its parameters now.

    Li et al., "Federated Optimization in Heterogeneous Networks" (2020), equation 2. The gradient
    is clipped with the term. The loss that is recorded is F alone, so that losses can be compared.
    """
    params = trained(worker.module, worker.optimizer)
    start = {key: p.detach().clone() for key, p in params.items()}

    def loss_at(step: int) -> Tensor:
        squares = [(p - start[key]).square().sum() for key, p in params.items()]
        term = mu / 2 * torch.stack(squares).sum()
        return worker.loss_at(step) + (term - term.detach())  # its value is 0, its gradient stays

    return replace(worker, loss_at=loss_at)
