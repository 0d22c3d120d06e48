"""The ClientApp: messages are forwarded to a warm trainer."""

from flower_desloc.app.sites.warm import WarmClientApp

app = WarmClientApp("links_trainer:app")
