"""Training loops of other libraries as the local loop of a client, each an extra of that name.

They use what an app of one's own has, ``DesLocClient`` and ``ClientWindow``, and nothing else of
the package knows them.
"""
