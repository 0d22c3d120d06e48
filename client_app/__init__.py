"""The ClientApp: hands every message to the client, in a process that stays warm."""

from flower_desloc.app.sites.audit import AuditedClientApp
from flower_desloc.app.sites.warm import WarmClientApp

# Imported by name, and not before it is needed: PyTorch alone takes seconds.
app = AuditedClientApp(WarmClientApp("client_app.client:app"))
