"""The ClientApp; in a deployment its messages are forwarded to a warm trainer."""

from flower_desloc.app.sites.warm import WarmClientApp

app = WarmClientApp("payload_trainer:app")
