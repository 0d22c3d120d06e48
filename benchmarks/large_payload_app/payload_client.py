"""The ClientApp, by way of a trainer where processes live for one message."""

from flower_desloc.sites.warm import WarmClientApp

app = WarmClientApp("payload_trainer:app")
