"""The ClientApp: the task's model and data, driven by DES-LOC."""

from client_app.worker import build_worker
from flower_desloc.flower.client import client_app

app = client_app(build_worker)
