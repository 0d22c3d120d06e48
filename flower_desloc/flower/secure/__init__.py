"""Secure aggregation over Flower's messages: ``flower_desloc.secure`` as a strategy and a mod.

Before the local steps of a window the sites exchange keys and shares through the server; the reply
to the window has masked codes; after it the sites confirm who is in the sum, and give the shares
that unmask it. The questions are of type ``query.secure``, with a ConfigRecord ``secure``.
"""
