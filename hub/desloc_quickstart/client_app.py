"""The ClientApp: a site's model, optimizer and data."""

import torch
from torch.nn.functional import cross_entropy

from desloc_quickstart.task import load_data, make_model
from flower_desloc import Worker, client_app


def build(config, context):
    """Return a site's worker, from the server's settings and the site's node config."""
    images, labels, held_images, held_labels = load_data(context.node_config, config["alpha"])
    model = make_model()

    def loss_at(step):
        draw = torch.Generator().manual_seed(step)  # a step always has the same batch
        batch = torch.randint(len(labels), (config["batch-size"],), generator=draw)
        return cross_entropy(model(images[batch]), labels[batch])

    @torch.no_grad()
    def evaluate():
        model.eval()
        logits = model(held_images)
        return {
            "nats": float(cross_entropy(logits, held_labels, reduction="sum")),
            "correct": int((logits.argmax(1) == held_labels).sum()),
            "examples": len(held_labels),
        }

    return Worker(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=config["learning-rate"]),
        loss_at=loss_at,
        num_examples=len(labels),
        evaluate=evaluate,
    )


app = client_app(build)
