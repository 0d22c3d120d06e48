"""Private workers of a small model, with an account that has no limit."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

pytest.importorskip("opacus")

from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.worker import Clipping, Worker
from flower_desloc.privacy.accounting import Step
from flower_desloc.privacy.worker import Examples, PrivateLoss, private

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
Y = X.sum(1, keepdim=True).sin()


@dataclass
class Open:
    """An account without a limit."""

    noise: float = 1.0
    secret: bytes = bytes(32)
    charged: list[tuple[str, Step]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)

    def noise_multiplier(self, sample_rate):
        return self.noise

    def require_left(self, query, step):
        pass

    def charge(self, query, answer, step):
        if query not in self.answers:
            self.charged.append((query, step))
        return self.answers.setdefault(query, answer) == answer


def loss(module, batch):
    x, y = batch
    return mse_loss(module(x), y)


def plain(**options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return Worker(
        module=module,
        optimizer=optimizer,
        loss_at=lambda step: loss(module, (X, Y)),
        num_examples=len(X),
        clipping=Clipping(norm=1.0),
        evaluate=lambda: {"loss": 1.0},
        data_version=lambda: "version",
        info=ClientInfo(device="cpu", memory_free=1, micro_batch=4, data={"label": len(X)}),
        **options,
    )


def guarded(account=None, *, of=lambda rows: (X[rows], Y[rows]), size=12, **options):
    worker = plain()
    examples = Examples(number=len(X), of=of, batch_size=size)
    made = PrivateLoss(
        module=worker.module,
        optimizer=worker.optimizer,
        loss=loss,
        examples=examples,
        account=account or Open(),  # type: ignore[arg-type]  # acts as an Account
        **{"max_grad_norm": 1.0, **options},
    )
    return private(worker, made)


def weights(worker):
    return nn.utils.parameters_to_vector(worker.module.parameters()).detach().clone()


def gradient(worker, step=0):
    grads, _ = worker.gradient(step)
    return torch.cat([grad.flatten() for grad in grads.values()])
