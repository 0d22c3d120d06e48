"""Tensors beside the messages: the same weights, and nobody gets or brings what is not theirs."""

import socket
import threading
import time

import pytest
import torch
from flower_path import Run
from flwr.app import ArrayRecord

from flower_desloc.flower.arrays import from_record
from flower_desloc.flower.flight import wire
from flower_desloc.flower.flight.wire import Parts, TensorClient, TensorServer, TransferError
from flower_desloc.flower.policy import Policy


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in from_record(run.result.arrays).items()}
