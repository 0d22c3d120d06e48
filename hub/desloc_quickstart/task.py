"""The model, and the data of a site.

    python -m desloc_quickstart.task FOLDER 3

writes three sites' data, for a deployment on one machine.
"""

import sys
from functools import cache
from pathlib import Path

import torch
from datasets import Dataset, load_from_disk
from flwr_datasets.partitioner import DirichletPartitioner
from sklearn.datasets import load_digits
from torch import Tensor, nn


def make_model() -> nn.Module:
    """Return a classifier of images of 8 x 8 pixels."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@cache
def partitions(number: int, alpha: float) -> DirichletPartitioner:
    """Return the digits of scikit-learn, which need no download, over ``number`` sites."""
    images, labels = load_digits(return_X_y=True)
    partitioner = DirichletPartitioner(number, partition_by="label", alpha=alpha, seed=0)
    partitioner.dataset = Dataset.from_dict({"image": images, "label": labels})
    return partitioner


def load_data(node_config: dict[str, bool | float | int | str], alpha: float) -> tuple[Tensor, ...]:
    """Return images and labels to train on, and the fifth that is held out.

    A simulated site has a partition; a real one has the data set in its ``data-path``.
    """
    if "partition-id" in node_config:
        parts = partitions(int(node_config["num-partitions"]), alpha)
        data = parts.load_partition(int(node_config["partition-id"]))
    else:
        data = load_from_disk(str(node_config["data-path"]))
    images = torch.tensor(data["image"], dtype=torch.float32) / 16
    labels = torch.tensor(data["label"])
    held_out = torch.arange(len(labels)) % 5 == 0
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


if __name__ == "__main__":
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    for site in range(number):
        partitions(number, 0.5).load_partition(site).save_to_disk(folder / f"site-{site}")
