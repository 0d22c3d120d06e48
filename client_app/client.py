"""The client itself: the task's model and data, driven by DES-LOC or a strategy of Flower's."""

from client_app.worker import build_worker
from flower_desloc.flower.client import client_app
from flower_desloc.flower.stock_client import answer_stock

app = client_app(build_worker)
answer_stock(app, build_worker)
